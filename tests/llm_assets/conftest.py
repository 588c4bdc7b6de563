"""A project whose graph was run once, and projects that begin with its artifacts."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from artifacts.leases import local_lease
from tests.conftest import Project, make_project
from tests.listening import run_watched
from tests.llm_assets.in_process import ask

SHARDS = ("raw_corpus", "clean_corpus", "base_model", "tokenized_shards")
EVALUATION = (*SHARDS, "checkpoint", "eval_metrics")
CONVERTED = "cache/conversions"
"""The model as it is served."""


@pytest.fixture(scope="session", autouse=True)
def one_spark() -> Iterator[None]:
    """Spark goes on where a stage or a command would end it: the next test has it."""
    with pytest.MonkeyPatch.context() as patch:
        for place in ("spark_jobs.runtime.session", "llm_assets.runners.spark"):
            patch.setattr(f"{place}.end_local_session", lambda: None)
        yield


@pytest.fixture(scope="session")
def made(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path, for_all_workers: Path
) -> Iterator[Project]:
    """A project after `llm-assets run`, its endpoint serving; tests leave it as it is."""
    project = make_project(tmp_path_factory.mktemp("made") / "project", tiny_model_folder)
    with local_lease(for_all_workers / "made.lock"):
        process = project.fork("llm-assets", "run")
        listened = run_watched(process)
        screen = (project.folder / "output.txt").rename(project.folder / "screen.txt")
        assert process.returncode == 0, screen.read_text()
        if not (for_all_workers / "made").exists():
            Project(for_all_workers / "copied").adopt(project, *EVALUATION, CONVERTED)
            (for_all_workers / "copied").rename(for_all_workers / "made")
    (project.folder / "listened.txt").write_text("\n".join(sorted(listened)))
    yield project
    project.stop()


@pytest.fixture(scope="session")
def already_made(request: pytest.FixtureRequest, for_all_workers: Path) -> Project:
    """Artifacts of `made`, of whichever worker: to adopt, not to run."""
    copy = Project(for_all_workers / "made")
    with local_lease(for_all_workers / "made.lock"):
        is_there = copy.folder.exists()
    if not is_there:
        request.getfixturevalue("made")
    return copy


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path, already_made: Project
) -> Iterator[Project]:
    """A project whose version 1 was promoted and serves."""
    project = make_project(tmp_path_factory.mktemp("served") / "project", tiny_model_folder)
    project.adopt(already_made, *EVALUATION, CONVERTED)
    project.run_well("llm-assets", "run")
    yield project
    project.stop()


@pytest.fixture(scope="session")
def judged(
    tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path, already_made: Project
) -> Project:
    """A project with every artifact up to the verdict, on record; no endpoint.

    Tests leave it as it is, or restore its store from `as it was`.
    """
    project = make_project(tmp_path_factory.mktemp("judged") / "project", tiny_model_folder)
    project.adopt(already_made, *EVALUATION)
    assert ask(project, "*model_version") == ""
    shutil.copytree(project.folder / "store", project.folder / "as it was")
    return project


@pytest.fixture
def project_here(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A fresh project whose commands and stages run in this process (`ProjectHere`)."""
    monkeypatch.setenv("LLM_ASSETS_CONFIG", str(project.config))
    monkeypatch.chdir(project.folder)
    return project


@pytest.fixture
def with_shards(project: Project, already_made: Project) -> Project:
    """A fresh project whose shards and what they come from are made."""
    project.adopt(already_made, *SHARDS)
    return project


@pytest.fixture
def with_evaluation(project: Project, already_made: Project) -> Project:
    """A fresh project in which a model was trained and evaluated, and nothing decided."""
    project.adopt(already_made, *EVALUATION)
    return project
