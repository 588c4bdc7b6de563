"""A file's content: opened, unpacked, within its source's limits, and watched.

Every size is bounded and every byte counted. Last, the encoding of text: recognized where nothing
else is possible and otherwise not guessed, since a wrong guess would be learned.
"""

import bz2
import codecs
import errno
import gzip
import io
import lzma
import re
import socket
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any, AnyStr

import pyarrow as pa

from artifacts.errors import UserError, first_line
from spark_jobs.read.document import Document, Fault
from spark_jobs.read.settings import Files
from spark_jobs.read.source_file import BLOCK_BYTES, SourceFile, Tick, watched

MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2", b"\xfd7zXZ\x00": "xz"}
OPENERS: dict[str, Callable[[io.BufferedReader], Any]] = {
    "gzip": lambda handle: gzip.GzipFile(fileobj=handle),
    "bz2": bz2.BZ2File,
    "xz": lzma.LZMAFile,
    "zstd": lambda handle: pa.CompressedInputStream(pa.PythonFile(handle), "zstd"),
}
"""Python's own readers notice a file that was cut off at its end."""
MOST_LAYERS = 2
"""Backups of what was compressed before are compressed again, `a.txt.gz.gz`."""
UNREACHABLE = {
    *(errno.EIO, errno.ENODEV, errno.ENOTCONN, errno.ENXIO, errno.ESTALE, errno.ETIMEDOUT),
    *(errno.ECONNABORTED, errno.ECONNRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN),
    *(errno.ENETUNREACH, errno.ECONNREFUSED, socket.EAI_AGAIN, socket.EAI_NONAME),
}
"""What a disk, drive or bucket says that is gone; setting files aside would lose all of it."""
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
"""What may be raised when a damaged file is read; NotImplementedError by zipfile, of a compression
that it does not know."""
BOMB_BYTES = 64 * 1024 * 1024
"""Unpacked size below which no file is taken for a compression bomb."""


class BadFile(UserError):
    """A file that as a whole cannot be read; the message names it."""


class SourceChanged(UserError):
    """The source changed between its fingerprint and its reading, which then begins again."""


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
    def open(self, ahead: bool = False) -> Iterator[io.BufferedReader]:
        """Open the unpacked bytes. Those that are read `ahead` are read again later, so that `tick`
        counts none of them and only watches the time.

        Raises:
            BadFile: they are damaged, cut off, far too many, or decoded within the context and in
                no encoding that can be told.
            SourceChanged: the file is gone.
            UserError: its disk or network drive does not answer.
        """
        tick = (lambda _: self.tick(0)) if ahead else self.tick
        form, shown = self.file.format, self.file.shown
        compression = form.compression
        try:
            with self.file.open(tick) as handle:
                yield unpacked(handle, compression, self.maximum_unpacked, shown, tick)
        # Before `DAMAGES`, among which it is as an OSError.
        except FileNotFoundError as error:
            raise SourceChanged(f"{shown} was removed while it was read") from error
        except UnicodeDecodeError as error:
            raise BadFile(self.not_utf8("the file", error).message) from error
        except DAMAGES as error:
            # Not damaged, but out of reach with all beside it.
            if isinstance(error, TimeoutError) or getattr(error, "errno", None) in UNREACHABLE:
                raise UserError(
                    f"{shown} cannot be read: its disk or network drive does not answer "
                    f"({first_line(error)}). Reconnect it; the same command resumes."
                ) from error
            raise BadFile(
                f"{shown} is damaged: its {compression or form.name} cannot be read ({error}). "
                "Fetch the file again, or take it out of the source."
            ) from error

    def document(self, identifier: str, text: str, where: str = "") -> Document:
        """A document of the file; `where` it is in the file, if it is not all of it."""
        return Document(
            identifier,
            text,
            self.source.name,
            path=self.file.name,
            language=self.file.format.language,
            place=f"{self.file.shown}, {where}" if where else self.file.shown,
        )

    def decoded(self, encoding: str) -> Fault:
        """The record of text that is learned though it is not UTF-8."""
        return Fault(encoding, self.file.name, "decoded")

    def not_utf8(self, where: str, error: UnicodeDecodeError) -> Fault:
        """The fault of text in another encoding, or in UTF-16 or UTF-32 that is no such text."""
        wide, shown = error.encoding[:6].upper().replace("_", "-"), self.file.shown
        if wide in ("UTF-16", "UTF-32"):
            return Fault(
                "not_utf8",
                f"{shown}: {where} is {wide} that is cut off or damaged ({error.reason}). Fetch "
                "the file again, or take it out of the source.",
            )
        declared = self.source.encoding
        is_cut = error.reason == "unexpected end of data"
        cut = "It ends within a character: where it was cut off, fetch it again. " if is_cut else ""
        # Latin-1 is not named: any bytes at all are text in it, which would be learned.
        return Fault(
            "not_utf8",
            f"{shown}: {where} is not UTF-8{f', nor {declared}' if declared else ''} (byte "
            f"0x{error.object[error.start]:02x} at position {error.start}). {cut}Set `encoding` of "
            "the source to the one that such text is in, such as GB18030, SHIFT_JIS or "
            "WINDOWS-1251, or convert it: iconv -f ENCODING -t UTF-8",
        )

    def too_large(self, where: str, size: int) -> Fault:
        """The fault of a document that is longer than the settings allow."""
        return Fault(
            "too_large",
            f"{self.file.shown}: {where} has {size / 1e6:,.1f} MB, more than "
            f"{self.source.maximum_document_megabytes:g} MB. Divide it, or raise "
            "`maximum_document_megabytes` of the source.",
        )


def unpacked(
    handle: io.BufferedReader, compression: str | None, limit: int, name: str, tick: Tick
) -> io.BufferedReader:
    """Open the unpacked content of an open file.

    Args:
        compression: what the name says; where it says none, the first bytes may still.
        limit: bytes beyond which reading raises BadFile, as of a compression bomb.
        tick: told of 0 bytes whenever some were unpacked.
    """
    if compression and not handle.peek(1):
        # No compressed content takes 0 bytes, so an upload was cut.
        raise EOFError("it has 0 bytes")
    unpacked_bytes = 0

    def count(number: int) -> None:
        nonlocal unpacked_bytes
        unpacked_bytes += number
        tick(0)
        if unpacked_bytes > limit:
            raise BadFile(
                f"{name} unpacks to more than {limit / 1e6:,.0f} MB. If it is meant to, raise "
                "`maximum_expansion` of the source."
            )

    layers = 0
    # Not read and sought back: the reader of zstd goes one way only.
    while compression := compression or next(
        (kind for mark, kind in MAGIC.items() if handle.peek(1).startswith(mark)), None
    ):
        # There are files that unpack to themselves, without an end.
        if layers == MOST_LAYERS:
            raise BadFile(
                f"{name} is compressed more than {MOST_LAYERS} times over. Unpack it until one "
                f"{compression} is left."
            )
        handle, compression = watched(OPENERS[compression](handle), count), None
        layers += 1
    return handle


@dataclass(frozen=True)
class OverlongLine:
    """Stands for a line that is longer than allowed, and was not kept."""

    length: int
    """Its bytes."""


def lines_of(stream: IO[AnyStr], end: AnyStr, maximum: int) -> Iterator[AnyStr | OverlongLine]:
    """The lines of a stream; of one that is longer than `maximum` bytes, in UTF-8 where it is text,
    only its length."""
    # One byte more than is allowed tells that a line is too long.
    while line := stream.readline(maximum + 1):
        length = _bytes_of(line)
        if length <= maximum:
            yield line
            continue
        # The rest of it is only counted, a block at a time.
        while not line.endswith(end) and (line := stream.readline(BLOCK_BYTES)):
            length += _bytes_of(line)
        yield OverlongLine(length)


def _bytes_of(line: str | bytes) -> int:
    return len(line.encode() if isinstance(line, str) else line)


WINDOWS_1252 = "windows-1252"
"""Western European text as older programs write it; Latin-1 is a part of it."""
MOST_ACCENTED = 0.3
"""Share of non-ASCII letters above which text is in no language of Western Europe."""
_MISPLACED = re.compile(
    r"(?<=[A-Za-z])[^\W\d_]*(?:[^\w\s\x00-\x7f\u00ad\u2013\u2014\u2019\u2026]|[¼½¾])(?=[a-z])"
    r"|(?<=[a-z])[À-ÖØ-ÞŒŠŽŸ]"
)
"""A symbol or a capital where other encodings have a small letter: `cafŽ` is `café` of an old
Macintosh. Dashes and dots stand between words without blanks, too."""
_BEYOND_ASCII = re.compile(r"[^\W\d_\x00-\x7f]+")
LONGEST_ACCENTED = 2
"""Letters beyond ASCII in a row that words of Western Europe have; words in Arabic, Cyrillic, Greek
or Hebrew letters, which may stand in a text of English, have more."""
_SUPERSCRIPT = re.compile(r"([^\W\d_]*)[¹²³]([^\W\d_]?)")
UNITS = {"m", "mm", "cm", "dm", "km", "µm", "nm", "ft", "in", "s"}
"""What is squared and cubed; after other letters, `by³` is the Polish `był`."""
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
UTF_32 = (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
_SPACE = 0x20
LOOKED_AT = 1024
"""Bytes that show whether every other one is the same, as in UTF-16 without a mark."""


def decode(content: bytes, declared: str | None = None) -> tuple[str, str | None]:
    """Decode text; also return the encoding that it was found to be in, None for UTF-8.

    UTF-16 is recognized by its mark or by the byte that most of its characters share. Other bytes
    are in the encoding that the source declares. If it declares none, they are taken for
    Windows-1252 if they read as Western European text. The encoding of anything else cannot be
    told, and UnicodeDecodeError is raised, so that nothing wrong is learnt.
    """
    if encoding := wide_encoding_of(content):
        return content.decode(encoding), encoding
    try:
        return content.decode("utf-8-sig"), None
    except UnicodeDecodeError:
        if declared is None:
            text = content.decode(WINDOWS_1252, "replace")
            if _is_western(text):
                return text, WINDOWS_1252
        elif not is_damaged_utf_8(content):
            return content.decode(declared), declared
        raise


def is_damaged_utf_8(content: bytes) -> bool:
    """Whether most of what is not ASCII is UTF-8, so that no other encoding explains the rest."""
    text = content.decode("utf-8", "replace")
    lost = text.count("\ufffd")
    return sum(not c.isascii() for c in text) > 2 * lost


def wide_encoding_of(start: bytes) -> str | None:
    """The kind of UTF-16 or UTF-32 that a file is in, by its first bytes; None where in none."""
    # Before UTF-16, with whose mark one of these begins.
    if start.startswith(UTF_32):
        return "UTF-32"
    if start.startswith(UTF_16):
        return "UTF-16"
    start = start[:LOOKED_AT]
    halves = {"UTF-16BE": start[::2], "UTF-16LE": start[1::2]}
    zeros = {encoding: half.count(0) for encoding, half in halves.items()}
    most = max(zeros, key=zeros.__getitem__)
    # One byte is the same in nearly all letters of an alphabet (0 in Latin, 4 in Cyrillic, 6 in
    # Arabic), and 0 in the spaces between; which of the two tells the byte order. Binary content
    # has zeros in both places.
    common = max(halves[most], key=halves[most].count, default=_SPACE)
    is_wide = common < _SPACE and halves[most].count(common) > len(halves[most]) / 2
    return most if is_wide and zeros[most] and min(zeros.values()) == 0 else None


def _is_western(text: str) -> bool:
    if "\ufffd" in text or any(ord(c) < 32 and c not in "\t\n\r\f" for c in text):
        return False
    # Shares of letters alone: numbers and signs are the same in all of these encodings.
    letters = [c for c in text if c.isalpha()]
    accented = sum(not c.isascii() for c in letters)
    if accented > MOST_ACCENTED * len(letters) or _MISPLACED.search(text):
        return False
    # Not any: German text may name the letters `äöüß`.
    runs = map(len, _BEYOND_ASCII.findall(text))
    if 2 * sum(run for run in runs if run > LONGEST_ACCENTED) > accented:
        return False
    powers = _SUPERSCRIPT.finditer(text)
    return all(
        not after and (not before or before in UNITS)
        for before, after in (m.groups() for m in powers)
    )
