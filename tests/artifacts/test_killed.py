"""Killed at any point of making an artifact, nothing half-written is ever read."""

from pathlib import Path

import pytest

from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from tests.faults import run_killed_at

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import sys
from tests.artifacts.test_killed import make
make(sys.argv[1])
"""
IDENTITY = Identity(kind="corpus", code_version="1")
POINTS = {
    "artifacts.store.store:open_draft": "before anything is written",
    "artifacts.store.store:list_files": "before checksums are computed",
    "artifacts.storage.files:flush_folder": "before files reach the disk",
    "artifacts.store.store:_commit_local": "before the manifest is written",
    "artifacts.leases:LocalLease.check": "while the lease is checked",
    "artifacts.store.pipelines:Pipeline.advance": "before the record is updated",
}


def make(root: str) -> None:
    store = Store(root)
    artifact, _ = store.make(IDENTITY, lambda draft: (draft.path / "text").write_text("whole"))  # type: ignore[arg-type,func-returns-value]
    Pipeline(store, "manual").advance(artifact)


@pytest.mark.fault(
    "store",
    "builder killed {when}",
    sees="the process is gone",
    then="nothing half-written is read; the next run builds the artifact",
)
@pytest.mark.parametrize(("point", "when"), POINTS.items())
def test_a_kill_at_any_point_leaves_nothing_half_made(
    point: str, when: str, tmp_path: Path
) -> None:
    root = str(tmp_path / "store")
    run_killed_at(point, "-c", PROGRAM, root, cwd=REPOSITORY)

    found = Store(root).find(IDENTITY)
    if found:
        found.verify()
    assert Pipeline(Store(root), "manual").find_current("corpus") is None

    make(root)
    current = Pipeline(Store(root), "manual").current("corpus", needed_by="test")
    current.verify()
    assert (current.path / "text").read_text() == "whole"
    assert not list((tmp_path / "store" / "drafts").iterdir())
