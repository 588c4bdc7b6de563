"""Files within zip and tar archives, read in place: nothing is unpacked onto the disk."""

import io
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import IO, Any

from artifacts.shown import shown_in_line
from spark_jobs.read.files.content import Content
from spark_jobs.read.files.source_file import SourceFile
from spark_jobs.read.files.streams import BadFile, Tick, counted
from spark_jobs.read.formats import format_of, kind_of

MOST_MEMBERS = 1_000_000
TAR_MEMBER_BYTES = 256 * 1024 * 1024
"""Largest file in a tar archive that is read; it is held in memory."""


@dataclass(frozen=True)
class Member(SourceFile):
    """A file within an archive."""

    opener: Callable[[], Any] = field(repr=False)

    def open(self, tick: Tick) -> IO[bytes]:
        # The archive itself is counted.
        return counted(self.opener(), lambda number: None)


@dataclass(frozen=True)
class Passed:
    """A member that is not read, and why."""

    kind: str
    name: str


def members(content: Content) -> Iterator[Member | Passed]:
    """The files of an archive in its own order, each readable until the next is asked for.

    Raises:
        BadFile: the archive is damaged, encrypted, or unpacks to far too much.
    """
    entries = _zip if content.file.format.ending == ".zip" else _tar
    unpacked = 0
    for number, member in enumerate(entries(content)):
        unpacked += member.size if isinstance(member, Member) else 0
        if unpacked > content.maximum_unpacked or number >= MOST_MEMBERS:
            raise BadFile(
                f"{content.file.shown} unpacks to more than {content.maximum_unpacked / 1e6:,.0f} "
                f"MB or {MOST_MEMBERS:,} files. If it is meant to, raise `maximum_expansion` of "
                "the source, or unpack it yourself."
            )
        yield member


def _zip(content: Content) -> Iterator[Member | Passed]:
    with content.file.open(content.tick) as handle:
        try:
            archive = zipfile.ZipFile(handle)
        except (zipfile.BadZipFile, NotImplementedError, OSError) as error:
            raise _unreadable(content, "zip", error) from error
        for entry in archive.infolist():
            if entry.is_dir():
                continue
            if entry.flag_bits & 1:
                raise BadFile(f"{content.file.shown} is encrypted. Unpack it, or take it out.")
            if stat.S_ISLNK(entry.external_attr >> 16):
                yield Passed("link in an archive", _name(content, entry.filename))
            else:
                opener = partial(archive.open, entry)
                yield _member(content, entry.filename, entry.file_size, opener)


def _tar(content: Content) -> Iterator[Member | Passed]:
    with content.open() as stream:
        try:
            # A stream that goes one way only: what is compressed is unpacked once.
            archive = tarfile.open(fileobj=stream, mode="r|")  # noqa: SIM115 - closed with the stream
            for entry in archive:
                if entry.isfile() and entry.size > TAR_MEMBER_BYTES:
                    yield Passed("too large file in an archive", _name(content, entry.name))
                elif entry.isfile():
                    read = cache(partial(_tar_member, archive, entry))
                    yield _member(content, entry.name, entry.size, partial(_in_memory, read))
                elif not entry.isdir():
                    kind = "link" if entry.issym() or entry.islnk() else "special file"
                    yield Passed(f"{kind} in an archive", _name(content, entry.name))
        except tarfile.TarError as error:
            raise _unreadable(content, "tar", error) from error


def _unreadable(content: Content, kind: str, error: Exception) -> BadFile:
    return BadFile(
        f"{content.file.shown} is not a readable {kind} archive ({error}). Fetch it again, or take "
        "it out of the source."
    )


def _tar_member(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    """Its content, for readers that go back and forth, as the archive's stream does not."""
    file = archive.extractfile(entry)
    assert file is not None, "a regular file has content"
    return file.read()


def _in_memory(read: Callable[[], bytes]) -> IO[bytes]:
    return io.BytesIO(read())


def _member(content: Content, path: str, size: int, opener: Callable[[], Any]) -> Member | Passed:
    name = _name(content, path)
    form = format_of(path)
    hidden = any(part.startswith(".") and part != "." for part in path.split("/"))
    if hidden and not content.source.hidden:
        return Passed("hidden", name)
    if form is None:
        return Passed(kind_of(path), name)
    if form.name == "archive":
        return Passed("archive in an archive", name)
    if form.name not in content.source.formats:
        return Passed(f"{form.name} files", name)
    return Member(f"{content.file.path}/{path}", name, size, form, opener)


def _name(content: Content, path: str) -> str:
    return f"{content.file.name}/{shown_in_line(path.removeprefix('./').lstrip('/'))}"
