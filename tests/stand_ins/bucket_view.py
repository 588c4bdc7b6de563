"""A bucket as one machine sees it, for `tests.stand_ins.mounted_buckets`."""

import errno
import time
from dataclasses import dataclass
from typing import Any

from tests.stand_ins.bucket_objects import BucketObjects, Object, PreconditionFailed

STAT_SECONDS = 60.0
"""Caching, Stat-cache TTL: one minute unless set otherwise, for what is there and what is not."""
FOLDER = Object("", 0, 0)


@dataclass
class OpenFile:
    """A file that one machine has open, its content on that machine's disk."""

    machine: "Machine"
    name: str
    content: Any
    generation: int
    """Of the object that it was opened with; 0 where it is new."""
    changed: bool
    handles: int = 0
    unlinked: bool = False


class Machine:
    """One machine's mount of one bucket: what it has open, and what it believes."""

    def __init__(self, objects: BucketObjects, folders: set[str] | None) -> None:
        self.objects = objects
        self.folders = folders
        """Folders of a hierarchical bucket, which are no objects; None in a flat one."""
        self.open: dict[str, OpenFile] = {}
        self.is_lost = False
        self._believed: dict[str, tuple[float, Object | None]] = {}

    def stat(self, name: str) -> Object | None:
        """A file, a folder or nothing, as this machine saw it within the last minute."""
        expires, found = self._believed.get(name, (0.0, None))
        if expires < time.monotonic():
            found = self._look_up(name)
            self.believe(name, found)
        return found

    def believe(self, name: str, found: Object | None) -> None:
        self._believed[name] = (time.monotonic() + STAT_SECONDS, found)

    def _look_up(self, name: str) -> Object | None:
        found = self.objects.find(name)
        if found is None and self.is_folder(name):
            return FOLDER
        return found

    def is_folder(self, name: str) -> bool:
        """Files and Directories: by its placeholder or, with --implicit-dirs, by what is in it."""
        return name in (self.folders or ()) or any(self.objects.list(f"{name}/", ""))

    def children(self, name: str) -> list[str]:
        """Reading directories: one listing up to the next slash, which no cache answers."""
        prefix = f"{name}/" if name else ""
        objects, prefixes = self.objects.list(prefix)
        for each in objects:
            self.believe(each.name, each)
        names = {each.name for each in objects if each.name != prefix}
        names |= {each.rstrip("/") for each in prefixes}
        names |= {each for each, file in self.open.items() if not file.unlinked}
        names |= self.folders or set()
        return [
            each.removeprefix(prefix)
            for each in sorted(names)
            if each.startswith(prefix) and "/" not in each.removeprefix(prefix)
        ]

    def send(self, file: OpenFile) -> None:
        """Writes: the whole content becomes a new generation of the object."""
        if not file.changed or file.unlinked or self.is_lost:
            return
        file.content.seek(0)
        try:
            sent = self.objects.write(file.name, file.content.read(), file.generation)
        except PreconditionFailed:
            # Stale File Handle Errors: another wrote or removed the object meanwhile.
            raise OSError(errno.ESTALE, file.name) from None
        file.generation, file.changed = sent.generation, False
        self.believe(file.name, sent)

    def move(self, name: str, target: str) -> None:
        """Copy and remove, since storage has no rename of objects."""
        if name in self.open:
            # Streaming Writes: a rename of a file that is being written finalizes it first.
            self.send(self.open[name])
            self.open[target] = self.open.pop(name)
            self.open[target].name = target
        moved = self.objects.copy(name, target)
        self.objects.remove(name)
        self.believe(target, moved)
        self.believe(name, None)
        if target in self.open:
            self.open[target].generation = moved.generation
