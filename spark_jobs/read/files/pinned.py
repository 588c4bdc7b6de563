"""Pins a source's files where they lie: footers of Parquet are read, lines of JSON are counted."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.errors import UserError
from artifacts.progress import CountedProgress
from artifacts.storage import files, transfer
from spark_jobs.read.files.streams import MAGIC, LocalFile, RemoteFile, SourceChanged, StoredFile
from spark_jobs.read.settings import Files
from spark_jobs.runtime.pinned import LineRange, PinnedFile, read_line

READERS = 32
"""Threads; a bucket answers many requests at a time, and a footer is a few kilobytes."""
LINES_ENDINGS = (".jsonl", ".ndjson")
STRETCH_BYTES = 16 * 1024 * 1024
"""After which a stretch ends with the line."""
MOST_GROUP_BYTES = 512 * 1024 * 1024
"""Most text in a row group, which one task of Spark holds in memory several times."""


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
            _check_first_line(source, file, pinned)
            pinned = pinned.model_copy(update={"stretches": list(_cut_lines(source, file))})
        else:
            row_groups, text_bytes = _read_row_groups(source, file, url)
            pinned = pinned.model_copy(update={"row_groups": row_groups})
        if transfer.generation_of(url) != pinned.generation:
            raise _changed(file)
    except FileNotFoundError as error:
        raise SourceChanged(f"{file.shown} was removed while it was pinned") from error
    return pinned, text_bytes


def _url(file: StoredFile) -> str:
    return os.path.abspath(file.path) if isinstance(file, LocalFile) else file.path


def _generation(file: StoredFile, checksum: str) -> str:
    """That of the content with the checksum."""
    if isinstance(file, RemoteFile):
        return file.listed.generation
    generation = transfer.generation_of(_url(file))
    if transfer.checksum_of(_url(file)) != checksum:
        raise _changed(file)
    return generation


def _changed(file: StoredFile) -> SourceChanged:
    return SourceChanged(f"{file.shown} changed while it was pinned")


def _check_first_line(source: Files, file: StoredFile, pinned: PinnedFile) -> None:
    """Raise UserError where the first document lacks what the settings say, or is no JSON."""
    for number, line in enumerate(_lines(source, file), start=1):
        kind = next((kind for magic, kind in MAGIC.items() if line.startswith(magic)), None)
        if kind:
            raise UserError(
                f"{file.shown} is compressed ({kind}), though its name does not say so. Unpack it, "
                "or have the source copied: `pin: false`."
            )
        if line.strip():
            read_line(pinned, line, number)
            return


def _cut_lines(source: Files, file: StoredFile) -> Iterator[LineRange]:
    """The file's lines, some megabytes at a time.

    Raises:
        UserError: a line is longer than a document may be.
    """
    size = lines = rows = 0
    for line in _lines(source, file):
        size += len(line)
        lines += 1
        rows += not line.isspace()
        if size >= STRETCH_BYTES:
            yield LineRange(size, lines, rows)
            size = lines = rows = 0
    if size:
        yield LineRange(size, lines, rows)


def _lines(source: Files, file: StoredFile) -> Iterator[bytes]:
    most_bytes = int(source.maximum_document_megabytes * 1e6)
    with file.open(lambda number: None) as stream:
        number = 0
        while line := stream.readline(most_bytes + 1):
            number += 1
            if len(line) > most_bytes:
                raise UserError(
                    f"{file.shown}, line {number}: more than {source.maximum_document_megabytes:g} "
                    "MB. Divide it, raise `maximum_document_megabytes` of the source, or have such "
                    "lines set aside and counted: `pin: false`."
                )
            yield line


def _read_row_groups(source: Files, file: StoredFile, url: str) -> tuple[list[int], int]:
    """Rows of each row group, and the bytes of text in all of them.

    Raises:
        UserError: the file is not Parquet, lacks a column, or has a row group that is too large.
    """
    try:
        with files.open_file(url) as opened:
            metadata = pq.ParquetFile(opened).metadata
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{file.shown} is not a readable Parquet file ({error}). Write it again, or take it "
            "out of the source."
        ) from error
    _check_columns(source, file, metadata.schema.to_arrow_schema())
    rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    return rows, _text_bytes(source, file, metadata)


def _check_columns(source: Files, file: StoredFile, schema: pa.Schema) -> None:
    for column in source.columns:
        if column not in schema.names:
            raise UserError(
                f"{file.shown} has no column {column!r}; its columns are "
                f"{', '.join(schema.names) or 'none'}. Name the columns in the source's settings."
            )
        kind = schema.field(column).type
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if not is_text and not (column == source.id_column and pa.types.is_integer(kind)):
            raise UserError(
                f"{file.shown}: the column {column!r} is {kind}, where text is read as it lies. "
                "Name another column, or have the source copied: `pin: false`."
            )


def _text_bytes(source: Files, file: StoredFile, metadata: pq.FileMetaData) -> int:
    """Bytes of the text as it lies unpacked."""
    total = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = (group.column(n) for n in range(group.num_columns))
        size = sum(
            column.total_uncompressed_size
            for column in columns
            if column.path_in_schema == source.text_column
        )
        if size > MOST_GROUP_BYTES:
            raise UserError(
                f"{file.shown}: row group {number} has {size / 1e6:,.0f} MB of text, more than the "
                f"{MOST_GROUP_BYTES / 1e6:,.0f} MB that one task can read. Write smaller row "
                "groups, or have the source copied: `pin: false`."
            )
        total += size
    return total
