"""A store is copied by ordinary programs while it is worked in, and restored elsewhere."""

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Draft, Store
from tests.conftest import ROOT, Project
from tests.needs import needs

PAGE = (ROOT / "docs" / "operations.md").read_text().partition("## Backup")[2]
FOLDER, WITH_RSYNC, WITH_TAR = (
    re.search(pattern, PAGE, re.MULTILINE)[0]  # type: ignore[index]
    for pattern in (r"^copy=.*$", r"^rsync -a .*\nrsync -a .*$", r"^\(tar -c .*\n\(tar -c .*$")
)
"""The commands that the page gives."""


@pytest.fixture
def project(judged: Project, tmp_path: Path) -> Project:
    """A copy of a project whose model was judged, with the store where a project has it."""
    project = Project(tmp_path / "lived_in")
    ignored = shutil.ignore_patterns("as it was")
    shutil.copytree(judged.folder, project.folder, ignore=ignored)
    (project.folder / ".llm_assets").mkdir(exist_ok=True)
    (project.folder / "store").rename(project.folder / ".llm_assets" / "store")
    settings = yaml.safe_load(project.config.read_text()) | {"store": ".llm_assets/store"}
    project.config.write_text(yaml.safe_dump(settings))
    return project


@contextmanager
def work_going_on(store: Store) -> Iterator[None]:
    """Artifacts are built and become current, one after another, while the block runs."""
    done, record = threading.Event(), Pipeline(store, "manual")

    def build(draft: Draft) -> None:
        (draft.path / "text").write_bytes(b"text" * 100_000)

    def work() -> None:
        for number in range(10_000):
            identity = Identity(kind="raw_corpus", code_version=f"test-{number}")
            record.advance(store.make(identity, build)[0])
            if done.is_set():
                return

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        done.set()
        worker.join()


@pytest.mark.parametrize(
    "copying", [pytest.param(WITH_RSYNC, marks=needs("rsync")), WITH_TAR], ids=["rsync", "tar"]
)
def test_what_is_copied_while_runs_go_on_is_whole_elsewhere(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copying: str
) -> None:
    monkeypatch.chdir(project.folder)
    expected = json.loads(project.run("llm-assets", "versions", "--json").stdout)
    copy, store = tmp_path / "backup", Store(".llm_assets/store")
    made_before = len(store.list_folder("raw_corpus"))
    script = f"set -eo pipefail; {FOLDER}\n{copying}".replace("/mnt/backup/manuals", str(copy))
    with work_going_on(store):
        subprocess.run(["bash", "-c", script], cwd=project.folder, check=True)
    assert len(store.list_folder("raw_corpus")) > made_before, "work went on"
    shutil.rmtree(project.folder / ".llm_assets" / "store")

    elsewhere = Project(tmp_path / "elsewhere")
    elsewhere.folder.mkdir()
    for name in ("manual.yaml", "dagster.yaml"):
        shutil.copy(project.folder / name, elsewhere.folder)
    shutil.copytree(copy, elsewhere.folder / ".llm_assets" / "store")

    checked = elsewhere.run("llm-assets", "doctor")
    assert "everything is in order" in checked.stdout, checked.stdout + checked.stderr
    restored = json.loads(elsewhere.run("llm-assets", "versions", "--json").stdout)
    assert [v["weights"] for v in restored] == [v["weights"] for v in expected]
