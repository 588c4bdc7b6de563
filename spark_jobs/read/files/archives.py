"""Zip and tar archives, read in place: nothing of them is unpacked onto the disk."""

import io
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Self

from artifacts.errors import shown_in_line
from spark_jobs.read.document import Fault
from spark_jobs.read.files.streams import BadFile, Content
from spark_jobs.read.formats import Format, format_of, kind_of
from spark_jobs.read.source_file import BLOCK_BYTES, SourceFile, Tick, watched

MOST_MEMBERS = 1_000_000
TAR_MEMBER_BYTES = 256 * 1024 * 1024
"""Largest file in a tar archive that is read; it is held in memory."""


@dataclass(frozen=True)
class Member(SourceFile):
    """A file within an archive."""

    opener: Callable[[], Any] = field(repr=False)

    def open(self, tick: Tick) -> io.BufferedReader:
        # Its bytes are counted as the archive's.
        return watched(self.opener(), lambda number: None)


def members(content: Content) -> Iterator[Member | Fault]:
    """The files of an archive in its own order, each readable until the next is asked for, and in
    place of one that is not read a record of it.

    Raises:
        BadFile: the archive is damaged, encrypted, or unpacks to far too much.
    """
    entries = _zip if content.file.format.ending == ".zip" else _tar
    unpacked = 0
    for number, member in enumerate(entries(content)):
        # By the sizes that the headers state, before anything of the member is unpacked.
        unpacked += member.size if isinstance(member, Member) else 0
        if unpacked > content.maximum_unpacked or number >= MOST_MEMBERS:
            raise BadFile(
                f"{content.file.shown} unpacks to more than {content.maximum_unpacked / 1e6:,.0f} "
                f"MB or {MOST_MEMBERS:,} files. If it is meant to, raise `maximum_expansion` of "
                "the source, or unpack it yourself."
            )
        yield member


def _zip(content: Content) -> Iterator[Member | Fault]:
    with content.open() as handle:
        try:
            archive = zipfile.ZipFile(handle)
        except UnicodeDecodeError as error:  # A name is marked as UTF-8, and is none.
            raise zipfile.BadZipFile(str(error)) from error
        for entry in archive.infolist():
            if entry.is_dir():
                continue
            # The lowest flag says that the entry is encrypted.
            if entry.flag_bits & 1:
                raise BadFile(f"{content.file.shown} is encrypted. Unpack it, or take it out.")
            # Unix programs store a file's mode in the upper half of these attributes.
            is_link = stat.S_ISLNK(entry.external_attr >> 16)
            form = "link in an archive" if is_link else _format_of(entry.filename, content)
            opener = partial(archive.open, entry)
            yield _member(content, entry.filename, entry.file_size, form, opener)


def _tar(content: Content) -> Iterator[Member | Fault]:
    with content.open() as stream:
        # A stream that goes one way only, so that compressed content is unpacked once.
        archive = tarfile.open(  # noqa: SIM115 - closed with the stream
            fileobj=stream, mode="r|", tarinfo=_TarHeader
        )
        for entry in archive:
            if entry.isdir():
                continue
            form: Format | str = _format_of(entry.name, content)
            if not entry.isfile():
                is_link = entry.issym() or entry.islnk()
                form = f"{'link' if is_link else 'special file'} in an archive"
            elif entry.size > TAR_MEMBER_BYTES:
                form = "too large file in an archive"
            # In memory, since readers seek, which the archive's stream cannot do.
            # Cached, since some readers open a member several times, and the stream goes one way.
            read = cache(partial(_tar_member, archive, entry))
            opener = partial(lambda read: io.BytesIO(read()), read)
            yield _member(content, entry.name, entry.size, form, opener)
        assert archive.fileobj is not None
        while rest := archive.fileobj.read(BLOCK_BYTES):
            # Anything else there is no text that is lost; this marks another archive's header.
            if b"ustar" in rest:
                raise tarfile.ReadError("it goes on after its end, as archives put together do")


def _tar_member(archive: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = archive.extractfile(entry)
    assert file is not None, "a regular file has content"
    return file.read()


class _TarHeader(tarfile.TarInfo):
    """A member's header; Python takes one that is damaged or cut off for the archive's end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        try:
            return super().fromtarfile(archive)
        except tarfile.HeaderError as error:
            is_end = isinstance(error, tarfile.EOFHeaderError)  # type: ignore[attr-defined]
            # With nothing before it, tarfile itself says that this is no archive.
            if is_end or archive.offset == 0:
                raise
            reason = f"{error} at byte {archive.offset:,}"
            if isinstance(error, tarfile.EmptyHeaderError):  # type: ignore[attr-defined]
                reason = "it ends without an archive's end, so it may be cut off"
            raise tarfile.ReadError(reason) from error


def _format_of(path: str, content: Content) -> Format | str:
    """A member's format; of one that is not read, what it is counted under."""
    form = format_of(path)
    hidden = any(part.startswith(".") and part != "." for part in path.split("/"))
    if hidden and not content.source.hidden:
        return "hidden"
    if form is None:
        return kind_of(path)
    if form.name == "archive":
        return "archive in an archive"
    return form if form.name in content.source.formats else f"{form.name} files"


def _member(
    content: Content, path: str, size: int, form: Format | str, opener: Callable[[], Any]
) -> Member | Fault:
    # `tar -cf a.tar .` puts that dot before each name; ids need not have it.
    name = f"{content.file.name}/{shown_in_line(path.removeprefix('./').lstrip('/'))}"
    if isinstance(form, str):
        return Fault(form, name, "unread")
    return Member(f"{content.file.path}/{path}", name, size, form, opener)
