"""Copies files with their checksums, so that damage is found by the copy and not by its reader."""

import hashlib
import os
import shutil
import sqlite3
from collections.abc import Iterable
from pathlib import Path

from artifacts.errors import DamagedArtifact, UserError
from artifacts.storage.checksums import FileEntry
from artifacts.storage.files import HASH_BLOCK_BYTES

DATABASE = ".db"
OF_DATABASES = ("-wal", "-shm", "-journal")
"""Endings of what belongs to an open database; its copy needs none of it."""


def copy_file(source: Path, target: Path, path: str) -> FileEntry:
    """Copy a file, whole or not at all; `path` is its name in the entry that is returned."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reading, partial.open("wb") as writing:
        while block := reading.read(HASH_BLOCK_BYTES):
            digest.update(block)
            size += writing.write(block)
        writing.flush()
        os.fsync(writing.fileno())
    shutil.copymode(source, partial)
    os.replace(partial, target)
    return FileEntry(path=path, bytes=size, sha256=digest.hexdigest())


def copy_known(source: Path, target: Path, entry: FileEntry) -> None:
    """Copy a file of a known checksum below two folders; raises DamagedArtifact for another."""
    copied = copy_file(source / entry.path, target / entry.path, entry.path)
    if copied.bytes != entry.bytes or (entry.sha256 and copied.sha256 != entry.sha256):
        (target / entry.path).unlink()
        raise DamagedArtifact(
            f"{source / entry.path} has another size or checksum than was recorded. For a store, "
            "`llm-assets doctor --repair` sets it aside; for a backup, use another one."
        )


def copy_database(source: Path, target: Path, path: str) -> FileEntry:
    """Copy an SQLite database as it is at one moment, while others write to it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    reading = sqlite3.connect(f"{source.resolve().as_uri()}?mode=ro", uri=True)
    writing = sqlite3.connect(target)
    try:
        reading.backup(writing)
    finally:
        reading.close()
        writing.close()
    content = target.read_bytes()
    return FileEntry(path=path, bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


def need_space(folder: Path, needed: int) -> None:
    """Raise UserError where a disk has not enough room for so many bytes."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < needed:
        raise UserError(
            f"{folder} has {free / 1e9:,.1f} GB free and needs {needed / 1e9:,.1f} GB: free some "
            "space, or give a folder on another disk."
        )


def total_bytes(paths: Iterable[Path]) -> int:
    """Bytes of some files; one that went meanwhile counts nothing."""
    found = 0
    for path in paths:
        try:
            found += path.stat().st_size
        except FileNotFoundError:
            continue
    return found
