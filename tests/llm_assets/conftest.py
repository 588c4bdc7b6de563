"""A project whose graph was run once, and projects that begin with its artifacts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Project, make_project

SHARDS = ("raw_corpus", "clean_corpus", "base_model", "tokenized_shards")
EVALUATION = (*SHARDS, "checkpoint", "eval_metrics")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Project]:
    """A project after `llm-assets run`, its endpoint serving; tests leave it as it is."""
    project = make_project(tmp_path_factory.mktemp("made") / "project", tiny_model_folder)
    ended = project.run("llm-assets", "run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (project.folder / "screen.txt").write_text(ended.stdout)
    yield project
    project.run("llm-assets", "stop")


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
