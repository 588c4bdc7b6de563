"""How it is told whether a file still holds what it held.

A generation is another one after each write, and costs no reading to ask: in Cloud Storage it is
the object's generation number, on a local disk size and time. A checksum is of the content: in
Cloud Storage it is the object's own, of a local file its SHA-256.
"""

import os
from typing import Any

from fsspec import AbstractFileSystem

from artifacts.storage import files
from artifacts.storage.checksums import sha256_of


def generation_of(url: str) -> str:
    """A file's generation now; raises FileNotFoundError where there is none."""
    if files.is_local(url):
        found = os.stat(url)
        return f"{found.st_size}-{found.st_mtime_ns}"
    filesystem, path = files.resolve(url)
    filesystem.invalidate_cache()
    return stated_generation(filesystem, path, filesystem.info(path))


def checksum_of(url: str) -> str:
    """A file's checksum now; raises FileNotFoundError where there is none."""
    if files.is_local(url):
        return sha256_of(url)
    filesystem, path = files.resolve(url)
    filesystem.invalidate_cache()
    return stated_checksum(filesystem, path, filesystem.info(path))


def stated_generation(filesystem: AbstractFileSystem, path: str, details: dict[str, Any]) -> str:
    """The generation in what a file system says of a file."""
    return str(details.get("generation") or stated_checksum(filesystem, path, details))


def stated_checksum(filesystem: AbstractFileSystem, path: str, details: dict[str, Any]) -> str:
    """The checksum in what a file system says of a file; where it says none, what stands for it."""
    stated = details.get("md5Hash") or details.get("crc32c") or details.get("etag")
    return str(stated or filesystem.ukey(path))
