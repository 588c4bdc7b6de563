"""The mounted buckets refuse what Cloud Storage FUSE refuses, by its page on semantics."""

import errno
import itertools
import os
from pathlib import Path

import psutil
import pytest
from google.cloud import storage

from tests.needs import FUSE, needs
from tests.stand_ins.google import BUCKET, HIERARCHICAL_BUCKET, LocalGoogle
from tests.stand_ins.mount import FuseMount
from tests.waiting import wait_until

pytestmark = needs(*FUSE)

_numbers = itertools.count()


@pytest.fixture(params=[BUCKET, HIERARCHICAL_BUCKET])
def bucket(request: pytest.FixtureRequest) -> str:
    """Each kind of bucket."""
    return request.param


@pytest.fixture
def folder(google: LocalGoogle, bucket: str) -> Path:
    """A new folder that a fresh machine has made in the bucket."""
    made = new_machine(google) / bucket / f"mount-{next(_numbers)}"
    made.mkdir()
    return made


def new_machine(google: LocalGoogle) -> Path:
    return google.mount.view(f"test-{next(_numbers)}")


def seen_by(machine: Path, folder: Path) -> Path:
    """The same folder, as another machine sees it."""
    return machine / folder.parent.name / folder.name


def objects(folder: Path) -> dict[str, bytes]:
    """Name, as the folder's listing begins it, to content of what is in storage."""
    found = storage.Client().list_blobs(folder.parent.name, prefix=f"{folder.name}/")
    return {blob.name[len(folder.name) + 1 :]: blob.download_as_bytes() for blob in found}


def mounts() -> str:
    return Path("/proc/self/mounts").read_text()


def test_a_mount_whose_process_was_killed_is_taken_away_by_its_keeper(
    google: LocalGoogle, tmp_path: Path
) -> None:
    folder = tmp_path / "gcs"
    mount = FuseMount(folder, google.storage.url, [])
    (keeper,) = [one for one in psutil.Process().children() if str(folder) in one.cmdline()]
    (server,) = keeper.children()
    server.kill()
    wait_until(lambda: str(folder) not in mounts())
    mount.stop()


def test_a_mount_whose_keeper_was_killed_too_is_taken_away_by_the_next(
    google: LocalGoogle, tmp_path: Path
) -> None:
    folder = tmp_path / "gcs"
    killed = FuseMount(folder, google.storage.url, [])
    (keeper,) = [one for one in psutil.Process().children() if str(folder) in one.cmdline()]
    (server,) = keeper.children()
    keeper.suspend()
    server.kill()
    keeper.kill()
    wait_until(lambda: not os.path.ismount(folder))
    assert str(folder) in mounts()

    FuseMount(tmp_path / "next", google.storage.url, []).stop()

    assert str(tmp_path) not in mounts()
    killed.stop()


def test_a_file_is_in_storage_once_it_is_closed_and_not_before(folder: Path) -> None:
    with (folder / "metrics.jsonl").open("w") as file:
        file.write("one\n")
        file.flush()
        os.fsync(file.fileno())
        assert "metrics.jsonl" not in objects(folder)
        assert (folder / "metrics.jsonl").read_text() == "one\n"
    assert objects(folder)["metrics.jsonl"] == b"one\n"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("two\n")
    assert objects(folder)["metrics.jsonl"] == b"one\ntwo\n"


def test_what_a_lost_machine_had_open_is_lost(google: LocalGoogle, folder: Path) -> None:
    machine = new_machine(google)
    with (seen_by(machine, folder) / "file").open("w") as file:
        file.write("never closed")
        file.flush()
        google.mount.lose(machine.name)
    assert "file" not in objects(folder)


def test_a_folder_leaves_a_placeholder_in_a_flat_bucket_alone(folder: Path, bucket: str) -> None:
    (folder / "model").mkdir()
    placeholders = {"", "model/"} if bucket == BUCKET else set()
    assert set(objects(folder)) == placeholders
    assert os.listdir(folder) == ["model"]


def test_a_folder_of_a_flat_bucket_is_not_renamed(folder: Path, bucket: str) -> None:
    (folder / "draft").mkdir()
    (folder / "draft" / "config.json").write_text("{}")
    if bucket == HIERARCHICAL_BUCKET:
        (folder / "draft").rename(folder / "model")
        assert objects(folder) == {"model/config.json": b"{}"}
        return
    with pytest.raises(OSError) as raised:
        (folder / "draft").rename(folder / "model")
    assert raised.value.errno == errno.EMFILE
    assert "draft/config.json" in objects(folder)


def test_a_file_is_renamed_over_another(folder: Path) -> None:
    (folder / "result.json").write_text("old")
    (folder / ".result.json.tmp").write_text("new")
    os.replace(folder / ".result.json.tmp", folder / "result.json")
    assert objects(folder).pop("result.json") == b"new"
    assert os.listdir(folder) == ["result.json"]
    assert (folder / "result.json").read_text() == "new"


def test_another_machine_believes_for_a_minute_what_it_has_seen(
    google: LocalGoogle, folder: Path
) -> None:
    other = seen_by(new_machine(google), folder)
    assert not (other / "key").exists()
    (folder / "key").write_text("new")
    assert not (other / "key").exists()
    assert os.listdir(other) == ["key"]
    assert (other / "key").exists()


def test_two_machines_make_the_same_folder(google: LocalGoogle, folder: Path) -> None:
    other = seen_by(new_machine(google), folder)
    assert not (other / "checkpoints").exists()
    (folder / "checkpoints").mkdir()
    (other / "checkpoints").mkdir(exist_ok=True)
    assert (other / "checkpoints").is_dir()


def test_the_first_to_close_wins_and_the_other_is_told(google: LocalGoogle, folder: Path) -> None:
    (folder / "file").write_text("start")
    other = seen_by(new_machine(google), folder)
    late = (other / "file").open("a")
    (folder / "file").write_text("first")
    late.write(" second")
    with pytest.raises(OSError) as raised:
        late.close()
    assert raised.value.errno == errno.ESTALE
    assert objects(folder)["file"] == b"first"


def test_a_folder_with_files_is_not_removed(folder: Path) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "file").write_text("x")
    with pytest.raises(OSError) as raised:
        (folder / "model").rmdir()
    assert raised.value.errno == errno.ENOTEMPTY
    (folder / "model" / "file").unlink()
    (folder / "model").rmdir()
    assert not (folder / "model").exists()
