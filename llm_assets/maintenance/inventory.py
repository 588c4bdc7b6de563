"""What lies in a store, from one walk over its files."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from artifacts.storage import files
from artifacts.store.layout import CACHE_FOLDER, RUNS_FOLDER
from artifacts.store.store import Store

FINGERPRINT = re.compile(r"[0-9a-f]{20}")


@dataclass
class Folder:
    """A folder `<kind>/<name>` of the store."""

    bytes: int = 0
    files: int = 0
    changed: float = 0.0
    """When its newest file was written, in seconds since 1970."""


@dataclass(frozen=True)
class CachedFile:
    """A file of a cache."""

    path: str
    """Relative to the store's root."""
    bytes: int
    used: float
    """When it was last read or written, as far as storage knows, in seconds since 1970."""


@dataclass
class Inventory:
    """Everything in a store: folders by `(kind, name)`, and the files of the caches."""

    folders: dict[tuple[str, str], Folder] = field(default_factory=dict)
    cached: list[CachedFile] = field(default_factory=list)

    def artifacts(self) -> Iterator[tuple[str, str]]:
        """Kind and fingerprint of every folder that is, or may become, an artifact."""
        return (key for key in sorted(self.folders) if self.may_be_artifact(*key))

    def may_be_artifact(self, kind: str, name: str) -> bool:
        """Whether `<kind>/<name>` is the name of an artifact, finished or not."""
        return kind != RUNS_FOLDER and bool(FINGERPRINT.fullmatch(name))


def take_inventory(store: Store) -> Inventory:
    """Walk over a store once; files directly under the root or a kind are left out."""
    found = Inventory()
    for path, size, changed, used in _files(store):
        parts = PurePosixPath(path).parts
        if parts[0] == CACHE_FOLDER:
            found.cached.append(CachedFile(path, size, used))
        elif len(parts) > 2:
            key = (parts[0], parts[1])
            if parts[0] == RUNS_FOLDER:
                # Each folder of a training counts by itself.
                found.folders.setdefault(key, Folder())
                if len(parts) > 3:
                    key = (f"{RUNS_FOLDER}/{parts[1]}", parts[2])
            folder = found.folders.setdefault(key, Folder())
            folder.bytes += size
            folder.files += 1
            folder.changed = max(folder.changed, changed)
    return found


def _files(store: Store) -> Iterator[tuple[str, int, float, float]]:
    """`(path, bytes, written at, used at)` of every file."""
    if not store.is_local:
        for path, described in files.describe(store.root).items():
            written = described["mtime"].timestamp()
            yield path, described["size"], written, written
        return
    folders = [store.root]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                    continue
                status = entry.stat(follow_symlinks=False)
                path = entry.path[len(store.root) + 1 :]
                used = max(status.st_atime, status.st_mtime)
                yield path, status.st_size, status.st_mtime, used
