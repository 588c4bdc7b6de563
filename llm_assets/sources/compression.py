"""Reads compressed files."""

import gzip
import io
from typing import Any

import pyarrow as pa


def unpack(handle: Any, compression: str | None) -> Any:
    """A file over the unpacked content of an open one.

    Args:
        compression: `gzip`, `zstd`, or None for content as it is.
    """
    if compression is None:
        return handle
    if compression == "gzip":
        # Python's own notices a cut-off file at its end.
        return gzip.GzipFile(fileobj=handle)
    return io.BufferedReader(_ZstdFile(pa.CompressedInputStream(pa.PythonFile(handle), "zstd")))


class _ZstdFile(io.RawIOBase):
    """Arrow's decompressing stream as a Python file."""

    def __init__(self, stream: pa.CompressedInputStream) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)
