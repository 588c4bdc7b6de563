"""Uploads and downloads: parallel parts, resumed, checked."""

import itertools
import os
from pathlib import Path

import fsspec
import pytest

from artifacts.errors import DamagedArtifact
from artifacts.storage import files, transfer
from artifacts.storage.transfer import download_folder, remote_entries, upload_folder
from tests.stand_ins.google import LocalGoogle

PART = 256 * 1024


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PART_BYTES", PART)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One file of more parts than storage joins at once, and some small ones."""
    made = tmp_path / "made"
    (made / "sub").mkdir(parents=True)
    (made / "large.bin").write_bytes(os.urandom(PART * 40 + 17))
    for number in range(10):
        (made / "sub" / f"{number}.txt").write_text(f"small {number}")
    return made


def sent_parts(google: LocalGoogle) -> list[str]:
    return [
        request.path
        for request in google.storage.requests
        if request.method == "POST" and request.bytes > PART / 2 and request.status == 200
    ]


def test_large_file_goes_up_in_parallel_parts_and_comes_back_equal(
    google: LocalGoogle, cloud_root: str, folder: Path, tmp_path: Path
) -> None:
    entries = upload_folder(folder, f"{cloud_root}/a", f"{cloud_root}/uploads")
    assert len(sent_parts(google)) == 40
    uploads = [r for r in google.storage.requests if r.method == "POST" and r.bytes > PART / 2]
    overlapping = sum(
        a.started < b.ended and b.started < a.ended for a, b in itertools.pairwise(uploads)
    )
    assert overlapping > 10
    download_folder(f"{cloud_root}/a", entries, tmp_path / "back")
    for entry in entries:
        assert (tmp_path / "back" / entry.path).read_bytes() == (folder / entry.path).read_bytes()
    assert not fsspec.filesystem("gs").find(f"{cloud_root}/uploads")


@pytest.mark.fault(
    "Google Cloud",
    "upload interrupted by a kill",
    sees="nothing",
    then="only what is missing is sent",
)
def test_interrupted_upload_sends_only_what_is_missing(
    google: LocalGoogle, cloud_root: str, folder: Path
) -> None:
    google.storage.add_fault(400, method="POST", contains="uploadType", times=1000, skip=34)
    with pytest.raises(Exception, match="fault 400"):
        upload_folder(folder, f"{cloud_root}/a", f"{cloud_root}/uploads")
    before = len(sent_parts(google))
    google.storage.clear()
    upload_folder(folder, f"{cloud_root}/a", f"{cloud_root}/uploads")
    assert before >= 20
    assert len(sent_parts(google)) <= 41 - before


@pytest.mark.parametrize("joined", [False, True])
def test_two_uploads_of_one_file_at_once_both_arrive(
    google: LocalGoogle,
    cloud_root: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    joined: bool,
) -> None:
    """The other one ends, and removes the parts, before or after this one joined them."""
    filesystem = fsspec.filesystem("gs")
    merge = filesystem.merge

    def meet(target: str, parts: list[str]) -> None:
        if joined:
            merge(target, parts)
        if target.endswith("/b/large.bin"):
            monkeypatch.setattr(filesystem, "merge", merge)
            upload_folder(folder, f"{cloud_root}/a", f"{cloud_root}/uploads")
        if not joined:
            merge(target, parts)

    monkeypatch.setattr(filesystem, "merge", meet)
    entries = upload_folder(folder, f"{cloud_root}/b", f"{cloud_root}/uploads")
    for name in ("a", "b"):
        assert [entry.crc32c for entry in remote_entries(f"{cloud_root}/{name}")] == [
            entry.crc32c for entry in entries
        ]
    assert not filesystem.find(f"{cloud_root}/uploads")


def test_uploading_what_is_there_sends_nothing(
    google: LocalGoogle, cloud_root: str, folder: Path
) -> None:
    upload_folder(folder, f"{cloud_root}/a", f"{cloud_root}/uploads")
    google.storage.clear()
    upload_folder(folder, f"{cloud_root}/a", f"{cloud_root}/uploads")
    assert {request.method for request in google.storage.requests} == {"GET"}


def test_busy_storage_is_asked_again(google: LocalGoogle, cloud_root: str, folder: Path) -> None:
    google.storage.add_fault(503, method="POST", times=3, skip=2)
    google.storage.add_fault(429, method="POST", times=2, skip=6)
    upload_folder(folder, f"{cloud_root}/a", f"{cloud_root}/uploads")


@pytest.mark.fault(
    "Google Cloud", "download damaged on the way", sees="that it was damaged", then="not used"
)
def test_damaged_download_is_refused(
    google: LocalGoogle, cloud_root: str, folder: Path, tmp_path: Path
) -> None:
    entries = upload_folder(folder, f"{cloud_root}/a", f"{cloud_root}/uploads")
    filesystem = fsspec.filesystem("gs")
    filesystem.pipe_file(f"{cloud_root}/a/sub/1.txt", b"smell 1")
    with pytest.raises(DamagedArtifact, match=r"sub/1\.txt"):
        download_folder(f"{cloud_root}/a", entries, tmp_path / "back")


def test_folders_made_through_a_mounted_bucket_are_no_files(
    google: LocalGoogle, cloud_root: str, tmp_path: Path
) -> None:
    filesystem = fsspec.filesystem("gs")
    for placeholder in ("a/", "a/model/", "a/empty/"):
        filesystem.pipe_file(f"{cloud_root}/{placeholder}", b"")
    files.write(f"{cloud_root}/a/model/config.json", b"{}")
    url = f"{cloud_root}/a"
    assert files.list_sizes(url) == {"model/config.json": 2}
    assert files.list_names(url) == ["empty", "model"]
    assert files.list_names(f"{url}/empty") == []
    entries = remote_entries(url)
    assert [entry.path for entry in entries] == ["model/config.json"]
    download_folder(url, entries, tmp_path / "back")
    assert (tmp_path / "back" / "model" / "config.json").read_bytes() == b"{}"
    files.remove(url)
    assert not filesystem.find(cloud_root)
