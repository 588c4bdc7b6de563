"""A project is backed up while it is worked in, and restored elsewhere."""

import json
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from artifacts.errors import DamagedArtifact, UserError
from artifacts.store.draft import Draft
from artifacts.store.identity import Identity
from llm_assets.backup.restore import restore
from llm_assets.backup.snapshot import newest_snapshot
from llm_assets.backup.take import back_up
from llm_assets.config import load_settings
from tests.conftest import Project

ASKED = ("versions", "--json"), ("explain", "1", "--json")


@pytest.fixture
def lived_in(made: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy of a project whose graph was run; its store is named relative to its folder."""
    project = Project(tmp_path / "lived_in")
    shutil.copytree(
        made.folder, project.folder, ignore=shutil.ignore_patterns("*.sock", "endpoint")
    )
    settings = yaml.safe_load(project.config.read_text()) | {"store": "store"}
    project.config.write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(project.folder)
    return project


@pytest.fixture
def small(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with one artifact; its store is named relative to its folder."""
    settings = yaml.safe_load(project.config.read_text()) | {"store": "store"}
    project.config.write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(project.folder)
    _make(project, 0)
    return project


def _make(project: Project, number: int) -> None:
    def build(draft: Draft) -> None:
        (draft.path / "text").write_bytes(b"text" * 100_000)

    identity = Identity(kind="raw_corpus", code_version=f"test-{number}", inputs={})
    artifact, _ = project.record.store.make(identity, build)
    project.record.advance(artifact)


@contextmanager
def _work_going_on(project: Project) -> Iterator[None]:
    """Artifacts are made and recorded, one after another, while the block runs."""
    done = threading.Event()

    def work() -> None:
        number = 0
        while not done.is_set():
            _make(project, number)
            number += 1

    worker = threading.Thread(target=work)
    worker.start()
    yield
    done.set()
    worker.join()


def _back_up(project: Project, folder: Path) -> list[str]:
    said: list[str] = []
    back_up(load_settings(project.config), project.config, folder, said.append)
    return said


@pytest.mark.soak
def test_what_was_restored_elsewhere_explains_itself(
    lived_in: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = tmp_path / "backup"
    with _work_going_on(lived_in):
        _back_up(lived_in, backup)
    expected = _asked(lived_in)
    history = lived_in.folder / ".llm_assets" / "dagster" / "history" / "runs.db"
    runs = _runs(history)
    monkeypatch.chdir(tmp_path)
    shutil.rmtree(lived_in.folder)

    elsewhere = Project(tmp_path / "elsewhere")
    elsewhere.folder.mkdir()
    done = elsewhere.run("llm-assets", "restore", str(backup))
    assert done.returncode == 0, done.stdout + done.stderr
    checked = elsewhere.run("llm-assets", "doctor")
    assert "everything is in order" in checked.stdout, checked.stdout + checked.stderr
    assert _asked(elsewhere) == expected
    assert json.loads(expected[0])[-1]["version"] == 1
    assert _runs(elsewhere.folder / history.relative_to(lived_in.folder)) == runs


def _asked(project: Project) -> list[str]:
    """What versions and explanations say, wherever the project lies."""
    said = [project.run("llm-assets", *asked).stdout for asked in ASKED]
    return [text.replace(str(project.folder), "") for text in said]


def _runs(database: Path) -> list[tuple[str, str]]:
    connection = sqlite3.connect(database)
    try:
        return connection.execute("SELECT run_id, status FROM runs ORDER BY run_id").fetchall()
    finally:
        connection.close()


def test_a_second_backup_copies_what_is_new(small: Project, tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    _back_up(small, backup)
    first, described = newest_snapshot(backup)
    before = {path: path.stat().st_mtime_ns for path in (backup / "artifacts").rglob("*")}
    _make(small, 1)
    _back_up(small, backup)
    second, again = newest_snapshot(backup)
    assert second != first and len(again.artifacts) == len(described.artifacts) + 1
    kept = {path for path in before if path.is_file()}
    assert all(path.stat().st_mtime_ns == before[path] for path in kept)


def test_an_unfinished_or_damaged_backup_restores_nothing(
    small: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backup = tmp_path / "backup"
    with pytest.raises(UserError, match="holds no backup"):
        newest_snapshot(backup)
    _back_up(small, backup)
    file = next(path for path in (backup / "artifacts").rglob("text"))
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(DamagedArtifact, match=file.name):
        restore(backup, None, print)
    assert not (elsewhere / "store" / "registry").exists()
    file.unlink()
    snapshot, _ = newest_snapshot(backup)
    (snapshot / "records" / "pipelines" / "manual.json").unlink()
    shutil.rmtree(elsewhere / "store")
    with pytest.raises(DamagedArtifact, match="nothing was restored"):
        restore(backup, None, print)


def test_a_store_that_is_there_is_never_overwritten(small: Project, tmp_path: Path) -> None:
    _back_up(small, tmp_path / "backup")
    before = small.record.history()
    with pytest.raises(UserError, match="is there already, and is not overwritten"):
        restore(tmp_path / "backup", small.config, print)
    assert small.record.history() == before
