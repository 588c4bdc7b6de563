"""Pins a source's Parquet files where they lie: their footers are read, their rows are not."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.errors import UserError
from artifacts.progress import CountedProgress
from artifacts.storage import files, versions
from llm_assets.sources.files.source_file import LocalFile, RemoteFile, SourceChanged, StoredFile
from llm_assets.sources.settings import Files
from spark_jobs.runtime.raw_parts import PinnedFile

READERS = 32
"""Threads; a bucket answers many requests at a time, and a footer is a few kilobytes."""
MOST_GROUP_BYTES = 512 * 1024 * 1024
"""Most text in a row group, which one task of Spark holds in memory several times."""


def pin_files(
    source: Files,
    found: Sequence[StoredFile],
    checksums: Sequence[str],
    report: Callable[[str], None],
) -> tuple[list[PinnedFile], int]:
    """The source's files as they are now, and the bytes of text in them, as their footers say.

    Args:
        checksums: of each file, taken when the source was opened.

    Raises:
        UserError: a file is not Parquet, lacks a column, or has a row group that is too large.
        SourceChanged: one is another than when the source was opened.
    """
    progress = CountedProgress(report, f"{source.name}: reading footers", len(found), "files")
    pinned, text_bytes = [], 0
    with ThreadPoolExecutor(READERS) as readers:
        pin = partial(_pin, source)
        for number, (one, size) in enumerate(readers.map(pin, found, checksums), start=1):
            pinned.append(one)
            text_bytes += size
            progress.advance(number)
    return pinned, text_bytes


def _pin(source: Files, file: StoredFile, checksum: str) -> tuple[PinnedFile, int]:
    if file.format.name != "parquet" or file.format.compression:
        raise UserError(
            f"Source {source.name!r} pins Parquet files, and {file.shown} is "
            f"{file.format.compression or file.format.name}. Set `formats: [parquet]` of the "
            "source, or have all of it copied: `pin: false`."
        )
    url = _url(file)
    try:
        generation = _generation(file, checksum)
        with files.open_file(url) as opened:
            metadata = pq.ParquetFile(opened).metadata
        if versions.generation_of(url) != generation:
            raise _changed(file)
    except FileNotFoundError as error:
        raise SourceChanged(f"{file.shown} was removed while its footer was read") from error
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{file.shown} is not a readable Parquet file ({error}). Write it again, or take it "
            "out of the source."
        ) from error
    _check_columns(source, file, metadata.schema.to_arrow_schema())
    return (
        PinnedFile(
            url=url,
            name=file.name,
            bytes=file.size,
            generation=generation,
            checksum=checksum,
            source=source.name,
            text_column=source.text_column,
            id_column=source.id_column,
            row_groups=[metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)],
        ),
        _text_bytes(source, file, metadata),
    )


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
    return SourceChanged(f"{file.shown} changed while its footer was read")


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
