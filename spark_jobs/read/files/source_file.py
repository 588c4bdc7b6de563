"""A file of a source: where it is, how it is opened, and how its change is noticed."""

import hashlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import IO, Any

from fsspec import AbstractFileSystem

from artifacts.errors import UserError
from artifacts.shown import shown_in_line
from artifacts.storage.versions import stated_checksum
from spark_jobs.read.files.streams import BLOCK_BYTES, Tick, counted
from spark_jobs.read.formats import Format


class SourceChanged(UserError):
    """The source changed between its fingerprint and its reading, which begins again then."""


@dataclass(frozen=True)
class SourceFile(ABC):
    """A file that can be read, of a known format."""

    path: str
    name: str
    """Relative to the source's folder; it enters document ids, so no machine's paths do."""
    size: int
    """Bytes, as stored."""
    format: Format

    @property
    def shown(self) -> str:
        """Its path for people."""
        return shown_in_line(self.path)

    @abstractmethod
    def open(self, tick: Tick) -> IO[bytes]:
        """The stored bytes, seekable; how many are read is told to `tick`."""


@dataclass(frozen=True)
class StoredFile(SourceFile):
    """A file that lies by itself, not within an archive."""

    @abstractmethod
    def state(self) -> object:
        """Another value whenever the content is another one; cheap to ask."""

    @abstractmethod
    def state_when_found(self) -> object:
        """Its state when the source was listed, without asking again where the list has it."""

    @abstractmethod
    def digest(self, tick: Tick) -> str:
        """A hash of the content; in the cloud, the object's own checksum."""


@dataclass(frozen=True)
class LocalFile(StoredFile):
    """A file on this machine."""

    def open(self, tick: Tick) -> IO[bytes]:
        return counted(open(self.path, "rb", buffering=0), tick)

    def state(self) -> object:
        found = os.stat(self.path)
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def state_when_found(self) -> object:
        return self.state()

    def digest(self, tick: Tick) -> str:
        digest = hashlib.sha256()
        with open(self.path, "rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                tick(len(block))
        return digest.hexdigest()


@dataclass(frozen=True)
class RemoteFile(StoredFile):
    """An object in the cloud, or a file of any other file system that fsspec knows."""

    filesystem: AbstractFileSystem
    details: dict[str, Any] = field(repr=False)

    def open(self, tick: Tick) -> IO[bytes]:
        return counted(self.filesystem.open(self.path, "rb"), tick)

    def state(self) -> object:
        self.filesystem.invalidate_cache()
        return stated_checksum(self.filesystem, self.path, self.filesystem.info(self.path))

    def state_when_found(self) -> object:
        return stated_checksum(self.filesystem, self.path, self.details)

    def digest(self, tick: Tick) -> str:
        tick(self.size)
        return stated_checksum(self.filesystem, self.path, self.details)
