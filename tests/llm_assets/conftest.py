"""A project whose graph was run once, and projects that begin with its artifacts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Project, make_project
from tests.listening import run_watched

SHARDS = ("raw_corpus", "clean_corpus", "base_model", "tokenized_shards")
EVALUATION = (*SHARDS, "checkpoint", "eval_metrics")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Project]:
    """A project after `llm-assets run`, its endpoint serving; tests leave it as it is."""
    project = make_project(tmp_path_factory.mktemp("made") / "project", tiny_model_folder)
    process = project.start("llm-assets", "run")
    listened = run_watched(process)
    screen = (project.folder / "output.txt").rename(project.folder / "screen.txt")
    assert process.returncode == 0, screen.read_text()
    (project.folder / "listened.txt").write_text("\n".join(sorted(listened)))
    yield project
    project.stop()


@pytest.fixture
def with_shards(project: Project, made: Project) -> Project:
    """A fresh project whose shards and what they come from are made."""
    project.adopt(made, *SHARDS)
    return project


@pytest.fixture
def with_evaluation(project: Project, made: Project) -> Project:
    """A fresh project in which a model was trained and evaluated, and nothing decided."""
    project.adopt(made, *EVALUATION)
    return project
