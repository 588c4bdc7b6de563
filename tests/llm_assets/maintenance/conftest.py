"""Stores that are a few weeks old."""

from pathlib import Path

import pytest

from tests.conftest import make_project
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
    made.pass_by(6, promoted=False)
    return made
