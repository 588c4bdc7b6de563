"""Text that others may not read is in no file that other users of the machine can open."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Project

GROUP_AND_OTHERS = 0o077


def open_to_others(folder: Path) -> Iterator[Path]:
    """What users beside the owner can come to and read or change."""
    for path in folder.iterdir():
        if path.is_symlink() or not path.stat().st_mode & GROUP_AND_OTHERS:
            continue
        yield path
        if path.is_dir():
            yield from open_to_others(path)


@pytest.fixture
def usual_umask() -> Iterator[None]:
    """What is made is readable by everyone, unless its maker sees to it."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.parametrize("was_there", [False, True], ids=["new", "made by an earlier release"])
@pytest.mark.usefixtures("usual_umask")
def test_what_dagster_and_the_commands_write_is_the_owners_alone(
    project: Project, was_there: bool
) -> None:
    own = set(open_to_others(project.folder))
    if was_there:
        for name in ("dagster/history", "logs", "services"):
            (project.folder / ".llm_assets" / name).mkdir(parents=True)
        (project.folder / "store").mkdir()
    ended = project.materialize("raw_corpus")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (project.folder / ".llm_assets" / "dagster" / "history").exists()
    assert (project.folder / "store" / "raw_corpus").exists()
    assert set(open_to_others(project.folder)) == own
    for private in (".llm_assets", ".llm_assets/dagster", "store"):
        assert not (project.folder / private).stat().st_mode & GROUP_AND_OTHERS
