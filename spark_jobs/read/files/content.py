"""A file's content as its reader sees it: opened, unpacked, within the source's limits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from spark_jobs.read.faults import Fault
from spark_jobs.read.files.source_file import SourceChanged, SourceFile
from spark_jobs.read.files.streams import DAMAGES, BadFile, Tick, unpacked
from spark_jobs.read.settings import Files

BOMB_BYTES = 64 * 1024 * 1024
"""Unpacked size below which no file is taken for a compression bomb."""
UTF_16 = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Content:
    """One file that is being read."""

    file: SourceFile
    source: Files
    tick: Tick

    @property
    def maximum_bytes(self) -> int:
        """Largest document."""
        return int(self.source.maximum_document_megabytes * 1e6)

    @property
    def maximum_unpacked(self) -> int:
        """Bytes that the file may unpack to."""
        return int(max(BOMB_BYTES, self.source.maximum_expansion * self.file.size))

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The unpacked bytes; raises BadFile where they are damaged, cut off or far too many."""
        form = self.file.format
        compression = form.compression
        try:
            with self.file.open(self.tick) as handle:
                yield unpacked(handle, compression, self.maximum_unpacked, self.file.shown)
        except FileNotFoundError as error:
            raise SourceChanged(f"{self.file.shown} was removed while it was read") from error
        except DAMAGES as error:
            raise BadFile(
                f"{self.file.shown} is damaged: its {compression or form.name} cannot be read "
                f"({error}). Fetch the file again, or take it out of the source."
            ) from error


def not_utf8(content: Content, where: str, error: UnicodeDecodeError) -> Fault:
    """The fault of text in another encoding."""
    encoding = "UTF-16" if error.object.startswith(UTF_16) else "LATIN1"
    guess = " It looks like UTF-16." if encoding == "UTF-16" else ""
    return Fault(
        "not_utf8",
        f"{content.file.shown}: {where} is not UTF-8 (byte 0x{error.object[error.start]:02x} at "
        f"position {error.start}).{guess} Convert it, for example with: "
        f"iconv -f {encoding} -t UTF-8",
    )


def too_large(content: Content, where: str, size: int) -> Fault:
    """The fault of a document that is longer than the settings allow."""
    return Fault(
        "too_large",
        f"{content.file.shown}: {where} has {size / 1e6:,.1f} MB, more than "
        f"{content.source.maximum_document_megabytes:g} MB. Divide it, or raise "
        "`maximum_document_megabytes` of the source.",
    )
