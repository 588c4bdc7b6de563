"""The parts of a corpus folder: Parquet files, read and written by tasks in any store."""

import fnmatch
import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.errors import UserError, make_command
from artifacts.storage import files

READERS = 16
"""Threads of the driver that read footers; a bucket answers several requests at a time."""

PART_NAMES = "part-*.parquet"

ORIGIN_KEY = b"origin"
"""Of a clean part's Parquet metadata (`Part.origin`)."""


@dataclass(frozen=True)
class Part:
    """One row group: what one task reads."""

    url: str
    row_group: int
    rows: int
    origin: str | None = None
    """Names what the part's documents were chosen from: where origins are equal, documents of equal
    ids are, too. Parts of a clean corpus have one."""

    def read(self, columns: list[str]) -> pa.Table:
        """The part's rows."""
        with files.open_file(self.url) as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            return parquet.read_row_group(self.row_group, columns=columns)

    def content_name(self) -> str:
        """Names what the part was made of: where names are equal, documents of equal ids are."""
        return self.origin or self.digest(["id", "text"])

    def digest(self, columns: list[str]) -> str:
        """A hash of columns as they are stored, so that nothing has to be unpacked for it.

        Equal digests mean equal rows; equal rows that were written otherwise have another digest.
        """
        digest = hashlib.sha256()
        with files.open_file(self.url) as file:
            group = pq.ParquetFile(file).metadata.row_group(self.row_group)
            for number in range(group.num_columns):
                column = group.column(number)
                if column.path_in_schema in columns:
                    digest.update(f"{column.path_in_schema} {column.physical_type}".encode())
                    file.seek(column.dictionary_page_offset or column.data_page_offset)
                    digest.update(file.read(column.total_compressed_size))
        return digest.hexdigest()


def find_parts(url: str, columns: list[str], asset: str) -> list[Part]:
    """The parts of a corpus folder in a fixed order.

    Raises:
        UserError: the folder holds no `part-*.parquet`, one is damaged or lacks a column.
    """
    names = fnmatch.filter(files.list_names(url), PART_NAMES)
    if not names:
        raise UserError(
            f"{url} holds no part-*.parquet files, so there is no `{asset}` to read. Make it with: "
            f"{make_command(asset)}"
        )
    parts_of = partial(_parts_of, columns=columns, asset=asset)
    with ThreadPoolExecutor(READERS) as readers:
        found = readers.map(parts_of, [f"{url}/{name}" for name in names])
        return list(itertools.chain.from_iterable(found))


def _parts_of(file: str, columns: list[str], asset: str) -> list[Part]:
    try:
        with files.open_file(file) as handle:
            metadata = pq.ParquetFile(handle).metadata
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{file} is not a readable Parquet file ({error}). Set what is damaged aside and "
            f"make it again with: llm-assets doctor --repair && {make_command(asset)}"
        ) from error
    found = metadata.schema.to_arrow_schema().names
    missing = [column for column in columns if column not in found]
    if missing:
        raise UserError(
            f"{file} of the `{asset}` has no column {missing[0]!r}; its columns are "
            f"{', '.join(found)}."
        )
    origin = (metadata.metadata or {}).get(ORIGIN_KEY)
    return [
        Part(
            file,
            number,
            metadata.row_group(number).num_rows,
            f"{origin.decode()}/{number}" if origin else None,
        )
        for number in range(metadata.num_row_groups)
    ]


def read_table(url: str, columns: list[str] | None = None, begin: int = 0) -> pa.Table:
    """A whole Parquet file, its checksums compared.

    Args:
        begin: at which byte of a local file it begins; not 0 for those of `cache.place_cached`.
    """
    if begin:
        with pa.memory_map(files.resolve(url)[1]) as mapped:
            content = pa.BufferReader(mapped.read_buffer().slice(begin))
            return pq.ParquetFile(content, page_checksum_verification=True).read(columns)
    with files.open_file(url) as file:
        return pq.ParquetFile(file, page_checksum_verification=True).read(columns)


def write_table(url: str, table: pa.Table) -> None:
    """Write a table as one Parquet file of one row group, whole or not at all.

    What it belongs to flushes it to the disk with all its other files.
    """
    files.write(url, to_parquet(table), sync=False)


def to_parquet(table: pa.Table, compression: str | dict[str, str] = "zstd") -> bytes:
    """A table as a Parquet file of one row group."""
    sink = pa.BufferOutputStream()
    rows = max(1, table.num_rows)
    pq.write_table(table, sink, row_group_size=rows, **parquet_options(table.schema, compression))
    return sink.getvalue().to_pybytes()


def parquet_options(
    schema: pa.Schema, compression: str | dict[str, str] = "zstd"
) -> dict[str, Any]:
    """How Parquet files are written here."""
    return {
        "compression": compression,
        "use_dictionary": [name for name in schema.names if name in ("source", "reason")],
        "write_page_checksum": True,
    }
