"""A maker that lost its lease commits nothing, and cannot touch what another has committed."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from artifacts import leases
from artifacts.errors import LeaseLost
from artifacts.store.identity import Identity
from artifacts.store.store import Draft, Store
from tests.waiting import WAIT_SECONDS, wait_until

IDENTITY = Identity(kind="corpus", code_version="1")
LIFETIME = 5.0
COMMITTED, LOST, OTHER = 0, 3, 4


def make_and_fall_asleep(root: str) -> None:
    """Build an artifact; stop, as a suspended machine does, before it is committed."""
    leases.LIFETIME_SECONDS = LIFETIME

    def build(draft: Draft) -> None:
        (draft.path / "text").write_text("of the sleeper")
        (draft.path / "more").write_text("of the sleeper, who writes more")
        os.kill(os.getpid(), signal.SIGSTOP)

    try:
        Store(root).make(IDENTITY, build)
    except LeaseLost:
        os._exit(LOST)
    except BaseException:
        os._exit(OTHER)
    os._exit(COMMITTED)


@contextmanager
def sleeper(store: Store) -> Iterator[BaseProcess]:
    """A maker that sleeps with its files written, and whose lease has been lost meanwhile."""
    process = get_context("spawn").Process(target=make_and_fall_asleep, args=(store.root,))
    process.start()
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    if store.is_local:
        # A local lease is a lock of the operating system; this is how it can be lost all the same.
        shutil.rmtree(Path(store.root) / "leases")
    try:
        yield process
    finally:
        process.kill()
        process.join()


def wake(process: BaseProcess) -> int | None:
    assert process.pid
    os.kill(process.pid, signal.SIGCONT)
    process.join(WAIT_SECONDS)
    return process.exitcode


def write_text(draft: Draft) -> None:
    (draft.path / "text").write_text("of the second")
    draft.stats["documents"] = 1


@pytest.fixture(autouse=True)
def short_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "LIFETIME_SECONDS", LIFETIME)


@pytest.mark.fault(
    "store",
    "builder suspended until another one has committed",
    sees="that it lost its lease",
    then="it commits nothing, and cannot change what was committed",
)
def test_who_wakes_after_another_has_committed_changes_nothing(any_store: Store) -> None:
    with sleeper(any_store) as process:
        artifact, made = any_store.make(IDENTITY, write_text)
        assert made
        assert wake(process) == LOST
    assert_whole(any_store)
    assert (artifact.path / "text").read_text() == "of the second"


@pytest.mark.fault(
    "store",
    "suspended builder resumes while another one builds",
    sees="that it lost its lease",
    then="the other one's artifact is intact",
)
def test_who_wakes_while_another_builds_does_not_commit(any_store: Store) -> None:
    with sleeper(any_store) as process:

        def build(draft: Draft) -> None:
            write_text(draft)
            assert wake(process) == LOST
            assert any_store.find(IDENTITY) is None

        any_store.make(IDENTITY, build)
    assert_whole(any_store)


def assert_whole(store: Store) -> None:
    artifact = store.load("corpus", IDENTITY.fingerprint)
    artifact.verify()
    assert [entry.path for entry in artifact.manifest.files] == ["text"]
    assert artifact.stats == {"documents": 1}
