"""Folders to and from Cloud Storage: large files in parallel parts, resumed, with checksums.

A large file goes up as parts named by its content (`uploads/<sha256>/<number>`), which storage then
joins. So an interrupted upload, asked for again, sends only the parts that are not there yet, by
whatever process and for whatever artifact.

Whether a file has changed is told by its checksum: of an object in Cloud Storage its own, which
costs no reading, of a local file its SHA-256.
"""

import base64
import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import DamagedArtifact
from artifacts.progress import Report
from artifacts.storage import files
from artifacts.storage.files import HASH_BLOCK_BYTES, FileEntry, describe, resolve, sha256_of

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def checksum_of(url: str) -> str:
    """A file's checksum now; raises FileNotFoundError where there is none."""
    if files.is_local(url):
        return sha256_of(url)
    filesystem, path = files.resolve(url)
    filesystem.invalidate_cache()
    return stated_checksum(filesystem, path, filesystem.info(path))


def stated_checksum(filesystem: "AbstractFileSystem", path: str, details: dict[str, Any]) -> str:
    """The checksum in a file's details as its file system gives them, or what it has in place of
    one."""
    # Cloud Storage has no MD5 of composite objects, which it joined from parts.
    checksum = details.get("md5Hash") or details.get("crc32c") or details.get("etag")
    return str(checksum or filesystem.ukey(path))


PART_BYTES = 16 * 1024 * 1024
PARALLEL_PARTS = 4
"""With the part size, the bound on memory: 64 MiB."""
SMALL_AT_ONCE = 64
"""Small files in flight."""
MOST_COMPONENTS = 32
"""Objects that Cloud Storage joins in one call."""


def describe_folder(folder: Path) -> list[FileEntry]:
    """Every file below a folder with its size and checksums, each read once."""
    with ThreadPoolExecutor(PARALLEL_PARTS) as pool:
        return list(pool.map(lambda name: _describe(folder, name), files.list_sizes(folder)))


def upload_folder(
    folder: Path,
    url: str,
    uploads_url: str,
    before_write: Callable[[], None] = lambda: None,
) -> list[FileEntry]:
    """Copy a local folder to `gs://bucket/path`, files that are there already left out; raises
    DamagedArtifact where one arrived with another checksum than was sent.

    Parts of large files go to another folder of the bucket. `before_write` is called before each
    write; what it raises ends the upload. Returns the files as a manifest lists them.
    """
    filesystem, target = resolve(url)
    present, sizes = _remote_checksums(url), files.list_sizes(folder)

    def send_small(names: list[str]) -> None:
        sources = [str(folder / name) for name in names]
        filesystem.put(sources, [f"{target}/{name}" for name in names], batch_size=SMALL_AT_ONCE)

    before_write()
    with ThreadPoolExecutor(1) as pool:
        # Small files that are not there at all go up while everything is being read for checksums.
        new = {name for name in sizes.keys() - present if sizes[name] <= PART_BYTES}
        sending = pool.submit(send_small, sorted(new))
        entries = describe_folder(folder)
        sending.result()
    missing = [e for e in entries if e.path not in new and present.get(e.path) != e.crc32c]
    before_write()
    send_small([entry.path for entry in missing if entry.bytes <= PART_BYTES])
    for entry in missing:
        if entry.bytes > PART_BYTES:
            before_write()
            _upload_parts(filesystem, folder, entry, target, uploads_url)
    # Storage's own checksums, of all files, those left out included: one listing.
    present = _remote_checksums(url)
    for entry in entries:
        if present.get(entry.path) != entry.crc32c:
            raise DamagedArtifact(
                f"{url}/{entry.path} did not arrive whole (its checksum in storage is "
                f"{present.get(entry.path, 'absent')}). Run the same again: what arrived is kept."
            )
    return entries


def download_folder(
    url: str, entries: list[FileEntry], folder: Path, report: Report = lambda line: None
) -> None:
    """Fetch an artifact's files into a local folder, large ones in parallel ranges; raises
    DamagedArtifact where one arrived with another checksum than its entry."""
    filesystem, source = resolve(url)
    small = [entry for entry in entries if entry.bytes <= PART_BYTES]
    for entry in entries:
        (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
    if small:
        filesystem.get(
            [f"{source}/{entry.path}" for entry in small],
            [str(folder / entry.path) for entry in small],
            batch_size=SMALL_AT_ONCE,
        )
    for entry in entries:
        if entry.bytes > PART_BYTES:
            report(f"Downloading {entry.path}, {entry.bytes / 1e6:,.0f} MB")
            _download_ranges(filesystem, f"{source}/{entry.path}", entry, folder / entry.path)
    for entry in entries:
        copy = _describe(folder, entry.path)
        if entry.crc32c not in (None, copy.crc32c) or entry.sha256 not in (None, copy.sha256):
            raise DamagedArtifact(f"{url}/{entry.path} arrived damaged. Run the same again.")


def remote_entries(url: str) -> list[FileEntry]:
    """The files of a folder in a bucket, with the checksums that Cloud Storage itself keeps."""
    return [
        FileEntry(path=path, bytes=int(details["size"]), crc32c=details.get("crc32c"))
        for path, details in describe(url).items()
    ]


def _describe(folder: Path, name: str) -> FileEntry:
    import google_crc32c

    sha256, crc32c = hashlib.sha256(), google_crc32c.Checksum()
    size = 0
    with (folder / name).open("rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            sha256.update(block)
            crc32c.update(block)
            size += len(block)
    return FileEntry(path=name, bytes=size, sha256=sha256.hexdigest(), crc32c=_as_stored(crc32c))


def _as_stored(crc32c: Any) -> str:
    """A checksum as Cloud Storage writes it: base64 of the big-endian CRC-32C."""
    return base64.b64encode(crc32c.digest()).decode()


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _remote_checksums(url: str) -> dict[str, str | None]:
    return {entry.path: entry.crc32c for entry in remote_entries(url)}


def _upload_parts(
    filesystem: Any, folder: Path, entry: FileEntry, target: str, uploads_url: str
) -> None:
    # The part size is in the name, since parts of another size are other parts.
    parts = f"{uploads_url}/{entry.sha256}-{PART_BYTES}"
    count = -(-entry.bytes // PART_BYTES)
    urls = [f"{parts}/{number:06d}" for number in range(count)]
    while True:
        _send_parts(filesystem, folder / entry.path, parts, urls)
        # Who sent the same file at the same time may have joined it, and removed the parts.
        with suppress(FileNotFoundError):
            _join(filesystem, urls, f"{target}/{entry.path}")
            break
    filesystem.invalidate_cache()
    # Only once they are joined: until then another attempt goes on from them.
    with suppress(FileNotFoundError):
        filesystem.rm(filesystem.find(parts))


def _send_parts(filesystem: Any, path: Path, parts: str, urls: list[str]) -> None:
    """Write those parts of a file that are not in the folder `parts` yet."""
    import google_crc32c

    present = _remote_checksums(parts)
    with path.open("rb") as source:
        batch: dict[str, bytes] = {}
        for number, url in enumerate(urls):
            source.seek(number * PART_BYTES)
            part = source.read(PART_BYTES)
            if present.get(os.path.basename(url)) == _as_stored(google_crc32c.Checksum(part)):
                continue
            batch[url] = part
            if len(batch) == PARALLEL_PARTS:
                filesystem.pipe(batch)
                batch = {}
        if batch:
            filesystem.pipe(batch)


def _join(filesystem: Any, parts: list[str], target: str) -> None:
    """Compose any number of parts, 32 at a time; intermediate objects lie beside the parts."""
    level = 0
    while len(parts) > MOST_COMPONENTS:
        folder = os.path.dirname(parts[0])
        joined = []
        for number, group in enumerate(_batches(parts, MOST_COMPONENTS)):
            name = f"{folder}/joined-{level}-{number:06d}"
            filesystem.merge(name, group)
            joined.append(name)
        parts, level = joined, level + 1
    filesystem.merge(target, parts)


def _download_ranges(filesystem: Any, source: str, entry: FileEntry, target: Path) -> None:
    starts = list(range(0, entry.bytes, PART_BYTES))
    with target.open("wb") as file:
        for group in _batches(starts, PARALLEL_PARTS):
            ends = [min(start + PART_BYTES, entry.bytes) for start in group]
            for part in filesystem.cat_ranges([source] * len(group), group, ends):
                if isinstance(part, Exception):
                    # A part that failed comes back as the error, among those that did not.
                    raise part
                file.write(part)
