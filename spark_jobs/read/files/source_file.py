"""A file of a source: where it is, how it is opened, and how its change is noticed."""

import hashlib
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import IO

from artifacts.errors import UserError
from artifacts.shown import shown_in_line
from artifacts.storage import files, versions
from spark_jobs.read.files.streams import BLOCK_BYTES, Tick, counted
from spark_jobs.read.formats import Format
from spark_jobs.runtime.pinned.file import ListedFile


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
    """An object in the cloud, or a file of any other file system that fsspec knows; its path is a
    URL."""

    listed: ListedFile

    def open(self, tick: Tick) -> IO[bytes]:
        filesystem, path = files.resolve(self.path)
        return counted(filesystem.open(path, "rb"), tick)

    def state(self) -> object:
        return versions.checksum_of(self.path)

    def state_when_found(self) -> object:
        return self.listed.checksum

    def digest(self, tick: Tick) -> str:
        tick(self.size)
        return self.listed.checksum
