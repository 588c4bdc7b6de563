"""One store, one name, one pipeline file."""

import shutil
from pathlib import Path

import pytest

from artifacts.errors import UserError
from tests.conftest import Project, make_project
from tests.llm_assets.in_process import ask, type_in


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = make_project(tmp_path / "project", base_model=tmp_path, documents=3)
    assert ask(made, "raw_corpus") == ""
    return made


def copy(project: Project, folder: Path) -> Project:
    """A second pipeline file, as people make one to try something."""
    folder.mkdir()
    shutil.copy(project.config, folder)
    return Project(folder)


@pytest.mark.fault(
    "settings and commands",
    "two pipeline files with the same `name` and `store`",
    sees="both paths, and what to do if the file was only moved",
    then="the second one builds, decides and shows nothing",
)
def test_a_second_file_of_one_name_and_store_is_refused(project: Project, tmp_path: Path) -> None:
    second = copy(project, tmp_path / "second")
    said = ask(second, "raw_corpus")
    assert str(project.config) in said and str(second.config) in said and "another `name`" in said

    told = type_in(second, "status")
    assert isinstance(told.exception, UserError) and str(project.config) in str(told.exception)
    assert ask(project, "raw_corpus") == "", "the first one goes on"


def test_a_file_can_be_moved(project: Project, tmp_path: Path) -> None:
    moved = copy(project, tmp_path / "moved")
    project.config.rename(project.config.with_suffix(".old"))
    assert ask(moved, "raw_corpus") == ""
    assert moved.config.exists()
    project.config.with_suffix(".old").rename(project.config)
    assert str(moved.config) in ask(project, "raw_corpus"), "now the other one is the second"


@pytest.mark.parametrize("key", ["name", "store"])
def test_another_name_or_another_store_is_another_pipeline(
    project: Project, tmp_path: Path, key: str
) -> None:
    second = copy(project, tmp_path / "second")
    text = second.config.read_text()
    if key == "name":
        second.config.write_text(text.replace("name: manual\n", "name: other\n", 1))
    else:
        store = str(project.folder / "store")
        second.config.write_text(text.replace(store, str(tmp_path / "elsewhere")))
    assert "name: other" in second.config.read_text() or key == "store"
    assert ask(second, "raw_corpus") == ""


def test_a_relative_store_is_the_one_beside_the_file(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = project.config.read_text().replace(str(project.folder / "store"), "store")
    project.config.write_text(text)
    second = copy(project, tmp_path / "second")
    monkeypatch.chdir(project.folder)
    assert str(project.config) in ask(second, "raw_corpus"), "run there, it is the same store"
    monkeypatch.chdir(shutil.copytree(project.folder, tmp_path / "whole"))
    assert ask(Project(tmp_path / "whole"), "raw_corpus") == "", "that one has its own store"
