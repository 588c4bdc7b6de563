"""Pins a source's files where they lie: footers of Parquet are read, lines of JSON are counted."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from artifacts.errors import UserError
from artifacts.progress import CountedProgress
from artifacts.storage import versions
from llm_assets.sources.files.footers import read_row_groups
from llm_assets.sources.files.source_file import LocalFile, RemoteFile, SourceChanged, StoredFile
from llm_assets.sources.files.stretches import check_first_line, cut_lines
from llm_assets.sources.settings import Files
from spark_jobs.runtime.pinned.file import PinnedFile

READERS = 32
"""Threads; a bucket answers many requests at a time, and a footer is a few kilobytes."""
LINES_ENDINGS = (".jsonl", ".ndjson")


def pin_files(
    source: Files,
    found: Sequence[StoredFile],
    checksums: Sequence[str],
    report: Callable[[str], None],
) -> tuple[list[PinnedFile], int]:
    """The source's files as they are now, and the bytes of text in them.

    Of Parquet these are what the footers say, of JSON lines the bytes of the lines.

    Args:
        checksums: of each file, taken when the source was opened.

    Raises:
        UserError: a file is neither Parquet nor JSON lines, lacks a column, or has a row group or
            line that is too large.
        SourceChanged: one is another than when the source was opened.
    """
    progress = CountedProgress(report, f"{source.name}: pinning", len(found), "files")
    pinned, text_bytes = [], 0
    with ThreadPoolExecutor(READERS) as readers:
        pin = partial(_pin, source)
        for number, (one, size) in enumerate(readers.map(pin, found, checksums), start=1):
            pinned.append(one)
            text_bytes += size
            progress.advance(number)
    return pinned, text_bytes


def _pin(source: Files, file: StoredFile, checksum: str) -> tuple[PinnedFile, int]:
    holds_lines = file.format.ending in LINES_ENDINGS
    if file.format.compression or not (holds_lines or file.format.name == "parquet"):
        kind = file.format.compression or f"{file.format.ending} ({file.format.name})"
        raise UserError(
            f"Source {source.name!r} pins Parquet files and JSON lines ({', '.join(LINES_ENDINGS)})"
            f" that are not compressed, and {file.shown} is {kind}. Set `formats` of the source to "
            "leave it out, or have all of it copied: `pin: false`."
        )
    url = _url(file)
    try:
        pinned = PinnedFile(
            url=url,
            name=file.name,
            bytes=file.size,
            generation=_generation(file, checksum),
            checksum=checksum,
            source=source.name,
            text_column=source.text_column,
            id_column=source.id_column,
        )
        if holds_lines:
            text_bytes = file.size
            check_first_line(source, file, pinned)
            pinned = pinned.model_copy(update={"stretches": list(cut_lines(source, file))})
        else:
            row_groups, text_bytes = read_row_groups(source, file, url)
            pinned = pinned.model_copy(update={"row_groups": row_groups})
        if versions.generation_of(url) != pinned.generation:
            raise _changed(file)
    except FileNotFoundError as error:
        raise SourceChanged(f"{file.shown} was removed while it was pinned") from error
    return pinned, text_bytes


def _url(file: StoredFile) -> str:
    if isinstance(file, RemoteFile):
        return str(file.filesystem.unstrip_protocol(file.path))
    assert isinstance(file, LocalFile)
    return os.path.abspath(file.path)


def _generation(file: StoredFile, checksum: str) -> str:
    """That of the content with the checksum."""
    if isinstance(file, RemoteFile):
        return versions.stated_generation(file.filesystem, file.path, file.details)
    generation = versions.generation_of(_url(file))
    if versions.checksum_of(_url(file)) != checksum:
        raise _changed(file)
    return generation


def _changed(file: StoredFile) -> SourceChanged:
    return SourceChanged(f"{file.shown} changed while it was pinned")
