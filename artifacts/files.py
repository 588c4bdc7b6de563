"""Sizes and checksums of a folder's files, local or in an object store."""

import hashlib

from fsspec import AbstractFileSystem

from artifacts.manifest import FileEntry

HASH_BLOCK_BYTES = 4 * 1024 * 1024


def list_files(filesystem: AbstractFileSystem, folder: str) -> list[FileEntry]:
    """Every file under a folder with its size and SHA-256, in the order of their paths."""
    folder = str(filesystem._strip_protocol(folder)).rstrip("/")
    return [
        FileEntry(
            path=path[len(folder) + 1 :],
            bytes=filesystem.size(path),
            sha256=sha256_of(filesystem, path),
        )
        for path in sorted(filesystem.find(folder))
    ]


def sha256_of(filesystem: AbstractFileSystem, path: str) -> str:
    """A file's SHA-256 in hexadecimal."""
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
