"""Reads files, compressed or not, with every size bounded and every byte counted."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa

from artifacts.errors import UserError

Tick = Callable[[int], None]
"""Told of every so many bytes that were read."""

BLOCK_BYTES = 1024 * 1024
MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
DAMAGES = (
    EOFError,
    OSError,
    zlib.error,
    lzma.LZMAError,
    pa.ArrowException,
    tarfile.TarError,
    zipfile.BadZipFile,
    NotImplementedError,
)
"""What reading a damaged file raises."""


class BadFile(UserError):
    """A file that as a whole cannot be read; the message names it."""


@dataclass(frozen=True)
class Overlong:
    """In place of a line that is longer than allowed; it was passed over, not kept."""

    length: int
    """Its bytes."""


def counted(handle: Any, tick: Tick) -> IO[bytes]:
    """The open file, each of whose reads is told to `tick`."""
    return io.BufferedReader(_Watched(handle, tick), BLOCK_BYTES)


def unpacked(handle: IO[bytes], compression: str | None, limit: int, name: str) -> IO[bytes]:
    """A file over the unpacked content of an open one.

    Args:
        compression: what the name says; where it says none, the first bytes may still.
        limit: bytes after which the content is taken for a compression bomb.

    Raises:
        BadFile: on reading, beyond the limit.
    """
    start = handle.read(6)
    handle.seek(0)
    compression = compression or next((k for m, k in MAGIC.items() if start.startswith(m)), None)
    if compression is None:
        return handle
    # Python's own readers notice a file that was cut off at its end.
    openers: dict[str, Callable[[], Any]] = {
        "gzip": lambda: gzip.GzipFile(fileobj=handle),
        "bz2": lambda: bz2.BZ2File(handle),
        "xz": lambda: lzma.LZMAFile(handle),  # noqa: SIM115 - its reader closes it
        "zstd": lambda: _Arrow(pa.CompressedInputStream(pa.PythonFile(handle), "zstd")),
    }
    unpacked_bytes = 0

    def count(number: int) -> None:
        nonlocal unpacked_bytes
        unpacked_bytes += number
        if unpacked_bytes > limit:
            raise BadFile(
                f"{name} unpacks to more than {limit / 1e6:,.0f} MB. If it is meant to, raise "
                "`maximum_expansion` of the source."
            )

    return counted(openers[compression](), count)


def lines_of(stream: IO[bytes], maximum: int) -> Iterator[bytes | Overlong]:
    """The lines of a stream; of one that is longer than `maximum` bytes, only its length."""
    while line := stream.readline(maximum + 1):
        if len(line) <= maximum:
            yield line
            continue
        length = len(line)
        while not line.endswith(b"\n") and (line := stream.readline(BLOCK_BYTES)):
            length += len(line)
        yield Overlong(length)


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


class _Arrow:
    """Arrow's decompressing stream as far as `_Watched` needs a file."""

    def __init__(self, stream: pa.CompressedInputStream) -> None:
        self._stream = stream

    def seekable(self) -> bool:
        return False

    def read(self, size: int) -> bytes:
        return bytes(self._stream.read(size))

    def close(self) -> None:
        self._stream.close()
