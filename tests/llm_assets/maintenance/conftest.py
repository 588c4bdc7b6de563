"""Stores that are a few weeks old."""

import shutil
from pathlib import Path

import pytest

from tests.conftest import Project, make_project
from tests.llm_assets.conftest import EVALUATION
from tests.llm_assets.in_process import ask
from tests.llm_assets.maintenance.weeks import Weeks


@pytest.fixture
def weeks(tmp_path: Path) -> Weeks:
    return Weeks(tmp_path / "store")


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Weeks:
    """Six weeks in the store of a pipeline file."""
    project = make_project(tmp_path / "project", base_model=tmp_path, documents=1)
    project.configure(retention={"days": 0, "versions": 2})
    monkeypatch.setenv("LLM_ASSETS_CONFIG", str(project.config))
    made = Weeks(project.folder / "store")
    for week in range(6):
        made.retrain(week, promoted=False)
    return made


@pytest.fixture(scope="session")
def judged(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path, made: Project
) -> Project:
    """A project with every artifact up to the verdict, on record; no endpoint."""
    project = make_project(tmp_path_factory.mktemp("judged") / "project", tiny_model_folder)
    project.adopt(made, *EVALUATION)
    assert ask(project, "*model_version") == ""
    shutil.copytree(project.folder / "store", project.folder / "as it was")
    return project
