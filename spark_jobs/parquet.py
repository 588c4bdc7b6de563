"""The parts of a corpus folder: Parquet files, read and written by tasks through fsspec."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.errors import UserError

READERS = 4
"""Threads of the driver that read parts; a bucket answers several requests at a time."""

HELD_OUT_FOLDER = "held_out"
"""In a folder of shards, the held-out texts, a file for each held-out shard. They make the shards a
pin by themselves: a later corpus finds in them what to keep held out."""

ORIGIN_KEY = b"origin"
"""Of a Parquet file's metadata: names its content, so that later stages know it without reading."""


@dataclass(frozen=True)
class Part:
    """One row group: what one task reads."""

    url: str
    row_group: int
    rows: int
    origin: str | None = None
    """A name of the content, where the part says so. Parts of a raw corpus with equal origins are
    equal; in those of a clean corpus, documents of equal ids are."""

    def read(self, columns: list[str]) -> pa.Table:
        """The part's rows."""
        with fsspec.open(self.url, "rb") as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            return parquet.read_row_group(self.row_group, columns=columns)

    def name(self, columns: list[str]) -> str:
        """Its origin, or for want of one a hash of these columns."""
        return self.origin or self._digest(columns)

    def _digest(self, columns: list[str]) -> str:
        """A hash of columns as they are stored, so that nothing has to be unpacked for it.

        Equal digests mean equal rows; equal rows that were written otherwise have another digest.
        """
        digest = hashlib.blake2b(digest_size=16)
        with fsspec.open(self.url, "rb") as file:
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
    filesystem, folder = fsspec.core.url_to_fs(url)
    files = sorted(filesystem.glob(f"{folder}/part-*.parquet"))
    if not files:
        raise UserError(
            f"{url} holds no part-*.parquet files, so there is no `{asset}` to read. Make it with: "
            f'dagster asset materialize --select "*{asset}"'
        )
    parts = []
    for file in files:
        try:
            with filesystem.open(file, "rb") as handle:
                metadata = pq.ParquetFile(handle).metadata
        except pa.ArrowInvalid as error:
            raise UserError(
                f"{file} is not a readable Parquet file ({error}). Delete its folder and "
                f"materialize `{asset}` again."
            ) from error
        found = metadata.schema.to_arrow_schema().names
        missing = [column for column in columns if column not in found]
        if missing:
            raise UserError(
                f"{file} of the `{asset}` has no column {missing[0]!r}; its columns are "
                f"{', '.join(found)}."
            )
        origin = (metadata.metadata or {}).get(ORIGIN_KEY)
        parts += [
            Part(
                filesystem.unstrip_protocol(file),
                number,
                metadata.row_group(number).num_rows,
                f"{origin.decode()}/{number}" if origin else None,
            )
            for number in range(metadata.num_row_groups)
        ]
    return parts


def find_pinned(shards: str | None) -> list[Part]:
    """The held-out texts of earlier shards, as parts; none without a pin.

    Raises:
        UserError: the shards keep no held-out texts.
    """
    if shards is None:
        return []
    return find_parts(f"{shards}/{HELD_OUT_FOLDER}", ["id", "text", "source"], "tokenized_shards")


def read_table(url: str, columns: list[str] | None = None) -> pa.Table:
    """A whole Parquet file, its checksums compared."""
    with fsspec.open(url, "rb") as file:
        return pq.ParquetFile(file, page_checksum_verification=True).read(columns)


def write_table(url: str, table: pa.Table, compression: str | dict[str, str] = "zstd") -> None:
    """Write a table as one Parquet file of one row group."""
    with open_writer(url, table.schema, compression) as writer:
        writer.write_table(table, row_group_size=max(1, table.num_rows))


@contextmanager
def open_writer(
    url: str, schema: pa.Schema, compression: str | dict[str, str] = "zstd"
) -> Iterator[pq.ParquetWriter]:
    """A Parquet writer that makes the folder it needs and leaves nothing where it fails.

    A local file appears under its name only when it is whole; an object store writes whole objects.
    """
    filesystem, path = fsspec.core.url_to_fs(url)
    folder, _, name = path.rpartition("/")
    filesystem.makedirs(folder, exist_ok=True)
    temporary = f"{folder}/.{name}.tmp"
    dictionary = [field.name for field in schema if field.name in ("source", "reason")]
    with (
        filesystem.open(temporary, "wb") as file,
        pq.ParquetWriter(
            file,
            schema,
            compression=compression,
            use_dictionary=dictionary,
            write_page_checksum=True,
        ) as writer,
    ):
        yield writer
    filesystem.mv(temporary, path)
