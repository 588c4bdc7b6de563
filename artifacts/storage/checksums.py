"""Sizes and checksums of a folder's files, local or in an object store."""

import hashlib
import os

from pydantic import BaseModel, ConfigDict

from artifacts.storage import files

_known: dict[tuple[int, ...], str] = {}
"""What the file system says of a local file (number, size, times) to its SHA-256: what this process
read once. A file that was only renamed is the same."""


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Relative to the artifact's folder, with forward slashes."""
    bytes: int
    sha256: str | None = None
    """None for a file that was written to Cloud Storage from elsewhere: `crc32c` stands for it."""
    crc32c: str | None = None
    """Base64, as Cloud Storage keeps it for every object; None in a local store."""


def list_files(folder: str) -> list[FileEntry]:
    """Every file under a folder with its size and SHA-256, in the order of their paths."""
    return [
        FileEntry(path=path, bytes=size, sha256=sha256_of(f"{folder}/{path}"))
        for path, size in files.list_sizes(folder).items()
    ]


def sha256_of(url: str) -> str:
    """A file's SHA-256 in hexadecimal; a local file is read once a process while unchanged."""
    if not files.is_local(url):
        return _read(url)
    found = os.stat(url)
    state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    if state not in _known:
        _known[state] = _read(url)
    return _known[state]


def _read(url: str) -> str:
    digest = hashlib.sha256()
    with files.open_file(url) as file:
        while block := file.read(files.HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
