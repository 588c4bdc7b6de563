"""A file of a source: where its bytes lie, and how much of them is read."""

import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from artifacts.errors import shown_in_line
from artifacts.storage import files, transfer
from spark_jobs.read.formats import Format

Tick = Callable[[int], None]
"""Called with the number of bytes that were just read."""

BLOCK_BYTES = 1024 * 1024
READ_BYTES = 64 * 1024
"""Read at a time: few, so that progress keeps up where little unpacks to much."""


@dataclass(frozen=True)
class SourceFile(ABC):
    """A file that can be read, of a known format."""

    path: str
    name: str
    """Relative to the source's folder; it enters document ids, so no machine's paths do."""
    size: int
    """Bytes, as stored."""
    format: Format

    @cached_property
    def shown(self) -> str:
        """Its path for people; each of its documents asks for it."""
        return shown_in_line(self.path)

    @abstractmethod
    def open(self, tick: Tick) -> io.BufferedReader:
        """Open the stored bytes, seekable; `tick` is told how many are read."""


State = tuple[int, ...] | str
"""Differs whenever a file's content differs, and is cheap to get."""


@dataclass(frozen=True)
class LocalFile(SourceFile):
    """A file on this machine."""

    listed_state: State
    """The state when the source was listed."""

    def open(self, tick: Tick) -> io.BufferedReader:
        # Unbuffered, since `watched` has a buffer of its own.
        return watched(open(self.path, "rb", buffering=0), tick)

    def state(self) -> State:
        """Its state now; raises FileNotFoundError where it is gone."""
        return local_state(os.stat(self.path))

    def digest(self, tick: Tick) -> str:
        """A hash of its content."""
        digest = hashlib.sha256()
        with open(self.path, "rb", buffering=0) as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                tick(len(block))
        return digest.hexdigest()


def local_state(status: os.stat_result) -> State:
    """A local file's state; the times come last."""
    # Copying and unpacking may keep a file's size and time of modification, but no program can set
    # the time of its last change (ctime).
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@dataclass(frozen=True)
class RemoteFile(SourceFile):
    """An object in the cloud, or a file of any other file system that fsspec knows; its path is a
    URL. Its state is the checksum that the file system says."""

    listed_state: str
    """The state when the source was listed."""

    def open(self, tick: Tick) -> io.BufferedReader:
        return watched(files.open_file(self.path), tick)

    def state(self) -> State:
        """Its state now; raises FileNotFoundError where it is gone."""
        return transfer.checksum_of(self.path)

    def digest(self, tick: Tick) -> str:
        """The checksum that its file system states."""
        tick(self.size)
        return self.listed_state


StoredFile = LocalFile | RemoteFile
"""A file that lies by itself, not within an archive."""


def watched(handle: Any, tick: Tick) -> io.BufferedReader:
    """The open file, each of whose reads is told to `tick`."""
    return io.BufferedReader(_Watched(handle, tick), READ_BYTES)


class _Watched(io.RawIOBase):
    """A readable file that tells how much is read of it."""

    def __init__(self, inner: Any, tick: Tick) -> None:
        self._inner, self._tick = inner, tick

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._inner.seekable())

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._inner.seek(offset, whence))

    def tell(self) -> int:
        return int(self._inner.tell())

    def readinto(self, buffer: Any) -> int:
        content = self._inner.read(len(buffer))
        buffer[: len(content)] = content
        self._tick(len(content))
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._inner.close()
        super().close()
