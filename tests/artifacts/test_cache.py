"""A cache decides speed, never a result."""

import hashlib
import os
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from artifacts import cache, libraries
from artifacts.cache import (
    cache_key,
    cached,
    cached_folder,
    cached_sha256,
    place_cached,
    read_cached,
    write_cached,
)


def test_a_folder_that_another_made_meanwhile_stays_and_a_damaged_one_goes(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "weights").write_text("1")

    def write_late(folder: Path) -> None:
        found.append((cached_folder(tmp_path, "key", write) / "weights").stat().st_ino)
        write(folder)

    found: list[int] = []
    weights = cached_folder(tmp_path, "key", write_late) / "weights"
    assert [weights.stat().st_ino] == found
    weights.write_text("2")
    assert (cached_folder(tmp_path, "key", write) / "weights").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_content_is_made_once(tmp_path: Path) -> None:
    made: list[str] = []

    def make() -> bytes:
        made.append("made")
        return b"content"

    folder = str(tmp_path / "cache")
    assert [cached(folder, "key", make) for _ in range(3)] == [b"content"] * 3
    assert made == ["made"]
    assert cached(None, "key", make) == b"content"
    assert made == ["made", "made"]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=64), data=st.data())
def test_a_damaged_entry_is_made_again(content: bytes, data: st.DataObject, tmp_path: Path) -> None:
    folder = str(tmp_path)
    write_cached(folder, "key", content)
    file = tmp_path / "key"
    entry = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(entry) - 1))
    if data.draw(st.booleans()):
        entry[place] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(bytes(entry))
    else:
        file.write_bytes(bytes(entry[:place]))

    assert read_cached(folder, "key") is None
    assert cached(folder, "key", lambda: content) == content
    assert read_cached(folder, "key") == content


def test_reading_renews_an_entry(tmp_path: Path) -> None:
    write_cached(str(tmp_path), "key", b"content")
    os.utime(tmp_path / "key", (1_000_000, 1_000_000))
    read_cached(str(tmp_path), "key")
    assert (tmp_path / "key").stat().st_mtime > 1_000_000


def test_a_files_checksum_is_taken_from_the_cache_until_the_file_is_changed(tmp_path: Path) -> None:
    file, folder = tmp_path / "weights", tmp_path / "cache"
    file.write_bytes(b"content")
    assert cached_sha256(folder, file) == hashlib.sha256(b"content").hexdigest()
    (entry,) = folder.iterdir()
    write_cached(str(folder), entry.name, b"as it was read before")
    assert cached_sha256(folder, file) == "as it was read before"
    times = file.stat()
    file.write_bytes(b"another")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert cached_sha256(folder, file) == hashlib.sha256(b"another").hexdigest()


def test_an_object_store_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, filesystem = "memory://bucket/cache", fsspec.filesystem("memory")
    write_cached(folder, "first", b"content")
    assert read_cached(folder, "second") is None
    # An entry that was written a day ago counts as new again once it is used.
    monkeypatch.setattr(cache, "_RENEWAL_SECONDS", 0)
    before = filesystem.modified("/bucket/cache/first")
    assert read_cached(folder, "first") == b"content"
    assert filesystem.modified("/bucket/cache/first") > before
    filesystem.rm("/bucket", recursive=True)


def test_runs_that_make_read_and_remove_at_once_all_get_their_content(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def work(number: int) -> bool:
        found = []
        for turn in range(150):
            content = str(turn % 5).encode() * 2_000
            found.append(cached(folder, str(turn % 5), partial(bytes, content)) == content)
            if number == 0:
                (tmp_path / str(turn % 5)).unlink(missing_ok=True)
        return all(found)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))


def test_every_ingredient_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return cache_key("words", "artifacts.store.identity", ["numpy"], text="a")

    keys = {
        key(),
        cache_key("lines", "artifacts.store.identity", ["numpy"], text="a"),
        cache_key("words", "artifacts.numbers", ["numpy"], text="a"),
        cache_key("words", "artifacts.store.identity", ["pyarrow"], text="a"),
        cache_key("words", "artifacts.store.identity", ["numpy"], text="b"),
        cache_key("words", "artifacts.store.identity", ["numpy"], words="a"),
    }
    for place, name, change in (
        (libraries, "version", lambda package: "0"),
        (libraries.platform, "python_version", lambda: "3.99"),
        (cache, "source_hash", lambda module: "other code"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, change)
            keys.add(key())
    assert len(keys) == 9
    assert key() in keys


def test_an_entry_is_placed_as_a_file_that_outlives_it(tmp_path: Path) -> None:
    folder, url = str(tmp_path / "cache"), str(tmp_path / "scratch" / "placed")

    def placed(make: Callable[[], bytes]) -> bytes:
        begin, sha256 = place_cached(folder, "key", make, url)
        content = Path(url).read_bytes()[begin:]
        assert sha256 == hashlib.sha256(content).hexdigest()
        return content

    assert placed(lambda: b"content") == placed(bytes) == b"content"
    assert Path(url).samefile(tmp_path / "cache" / "key")
    (tmp_path / "cache" / "key").unlink()
    assert Path(url).read_bytes().endswith(b"content")
    # Damage to the entry is damage to its second name, and is not placed again.
    placed(lambda: b"content")
    placed(bytes)
    (tmp_path / "cache" / "key").write_bytes(b"damaged")
    assert placed(lambda: b"again") == b"again"


def test_an_entry_is_copied_where_files_have_one_name(tmp_path: Path) -> None:
    folder, url = f"memory://{uuid.uuid4()}", str(tmp_path / "placed")

    for make in (lambda: b"content", bytes):
        begin, _ = place_cached(folder, "key", make, url)
        assert Path(url).read_bytes()[begin:] == b"content"
