"""The store: nothing half-written is ever read, and nothing is made twice."""

import errno
import multiprocessing
import os
import stat
import time
from pathlib import Path

import pytest

from artifacts.errors import DamagedArtifact, MissingArtifact, UserError
from artifacts.leases import LIFETIME_SECONDS
from artifacts.storage.files import make_private
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Draft, Store
from tests.waiting import WAIT_SECONDS, wait_until


def identity(steps: int = 1) -> Identity:
    return Identity(kind="corpus", code_version="1", settings={"steps": steps})


def write_hello(draft: Draft) -> None:
    (draft.path / "part").mkdir()
    (draft.path / "part" / "a.txt").write_text("hello")
    draft.stats["documents"] = 1


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def test_what_an_interrupted_maker_left_is_gone_from_the_next_one(store: Store) -> None:
    leftover = Path(store.folder_url("corpus", identity().fingerprint)) / "leftover.bin"
    leftover.parent.mkdir(parents=True)
    leftover.write_bytes(b"half")

    artifact, _ = store.make(identity(), write_hello)

    assert [entry.path for entry in artifact.manifest.files] == ["part/a.txt"]
    assert not leftover.exists()


@pytest.mark.fault("store", "manifest cannot be read", sees="the file", then="nothing is used")
def test_an_unreadable_manifest_is_named(store: Store) -> None:
    artifact, _ = store.make(identity(), write_hello)
    (artifact.path / "manifest.json").write_text("{")

    with pytest.raises(DamagedArtifact, match=r"manifest.json cannot be read"):
        store.find(identity())


@pytest.mark.fault(
    "store",
    "disk full while the manifest is written",
    sees="the path, and what to do",
    then="the artifact does not exist; it is rebuilt",
)
def test_a_full_disk_while_the_manifest_is_written_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(UserError, match="No space left on the disk"):
            store.make(identity(), write_hello)

    assert store.find(identity()) is None
    assert store.make(identity(), write_hello)[1]


def _make_slowly(root: str, log: str) -> None:
    def build(draft: Draft) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(0.3)
        write_hello(draft)

    Store(root).make(identity(), build)


def test_two_makers_at_once_build_it_once(tmp_path: Path) -> None:
    arguments = (str(tmp_path / "store"), str(tmp_path / "log"))
    context = multiprocessing.get_context("spawn")
    makers = [context.Process(target=_make_slowly, args=arguments) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join(WAIT_SECONDS)

    assert [maker.exitcode for maker in makers] == [0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def _hold_lease(root: str, held: str) -> None:
    with Store(root).lease("corpus"):
        Path(held).touch()
        time.sleep(60)


@pytest.mark.fault(
    "store", "holder of a lease killed", sees="nothing", then="the lease is released at once"
)
def test_a_killed_holder_leaves_no_lease_behind(any_store: Store, tmp_path: Path) -> None:
    held = tmp_path / "held"
    holder = multiprocessing.get_context("spawn").Process(
        target=_hold_lease, args=(any_store.root, str(held))
    )
    holder.start()
    wait_until(held.exists)
    holder.kill()
    holder.join(WAIT_SECONDS)

    started = time.monotonic()
    with any_store.lease("corpus"):
        assert time.monotonic() - started < LIFETIME_SECONDS / 2


def test_a_missing_input_names_the_command_that_makes_it(store: Store) -> None:
    with pytest.raises(MissingArtifact, match=r'--select "\*checkpoint"'):
        Pipeline(store, "docs").current("tokenized_shards", needed_by="checkpoint")


def test_files_and_folders_are_on_the_disk_before_the_manifest_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    real = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    artifact, _ = store.make(identity(), write_hello)

    manifest = next(n for n, name in enumerate(flushed) if "manifest.json" in name)
    assert {"a.txt", "part"} <= set(flushed[:manifest])
    assert "corpus" in flushed[manifest:], "the folder that the artifact is named in"
    assert artifact.path.parent.name == "corpus"


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, 0o700), (0o755, 0o700), (0o2775, 0o2770), (0o750, 0o700), (0o500, 0o500)],
)
def test_a_store_is_its_owners_alone_or_of_those_it_is_shared_with(
    tmp_path: Path, before: int | None, after: int
) -> None:
    store = tmp_path / "above" / "store"
    umask = os.umask(0o022)
    try:
        if before is not None:
            store.mkdir(parents=True)
            store.chmod(before)
        make_private(store)
        if after != 0o500:
            Store(str(store)).make(identity(), write_hello)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(store.stat().st_mode) == after
    if before is None:
        assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700


@pytest.mark.fault(
    "store",
    "program outlives its parent",
    sees="nothing",
    then="it cannot change what was committed",
)
def test_a_program_that_outlives_its_maker_cannot_reach_what_was_committed(store: Store) -> None:
    paths: list[Path] = []

    def die(draft: Draft) -> None:
        write_hello(draft)
        paths.append(draft.path)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.make(identity(), die)
    artifact, _ = store.make(identity(), write_hello)
    with pytest.raises(FileNotFoundError):
        (paths[0] / "part" / "a.txt").write_text("from the orphan")
    artifact.verify()
    assert not list((Path(store.root) / "drafts").iterdir())
