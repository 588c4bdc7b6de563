"""The parts of a corpus folder: Parquet files, read and written by tasks in any store.

Rows that concern the parts of a corpus, such as which documents stay, are kept in Arrow files with
one batch per part. Whoever finds them writes them, and the task that reads a part reads its batch,
so that no process has to hold all of them. Rows that later runs need again are cached.
"""

import fnmatch
import hashlib
import itertools
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.cache import read_cached, write_cached
from artifacts.errors import UserError, make_command
from artifacts.storage import files

if TYPE_CHECKING:
    from pyarrow.dataset import Dataset, Expression


READERS = 16
"""Threads of the driver that read footers; a bucket answers several requests at a time."""

PART_NAMES = "part-*.parquet"
RAW_COLUMNS = ["id", "text", "source"]
"""Columns of every raw corpus."""

ORIGIN_KEY = b"origin"
"""Key in a clean part's Parquet metadata (`Part.origin`)."""


@dataclass(frozen=True)
class Part:
    """One row group: what one task reads."""

    url: str
    row_group: int
    rows: int
    origin: str | None = None
    """Identifies what the part's documents were chosen from: with equal origins, documents with
    equal ids are equal. Only parts of a clean corpus have one."""

    def read(self, columns: list[str]) -> pa.Table:
        """The part's rows."""
        with files.open_file(self.url) as file:
            parquet = pq.ParquetFile(file, page_checksum_verification=True)
            return parquet.read_row_group(self.row_group, columns=columns)

    def content_name(self) -> str:
        """Identifies what the part was made from: with equal names, equal ids mean equal texts."""
        return self.origin or self.digest(["id", "text"])

    def digest(self, columns: list[str]) -> str:
        """Hash columns as they are stored, without decompressing them.

        Equal digests mean equal rows; equal rows may be stored in different ways, and then have
        different digests.
        """
        digest = hashlib.sha256()
        with files.open_file(self.url) as file:
            group = pq.ParquetFile(file).metadata.row_group(self.row_group)
            for number in range(group.num_columns):
                column = group.column(number)
                if column.path_in_schema in columns:
                    # Bytes of one column must not pass for those of another.
                    digest.update(f"{column.path_in_schema} {column.physical_type}".encode())
                    # A dictionary page, if there is one, precedes the data pages.
                    file.seek(column.dictionary_page_offset or column.data_page_offset)
                    digest.update(file.read(column.total_compressed_size))
        return digest.hexdigest()


def list_files(folder: str, pattern: str = PART_NAMES) -> list[str]:
    """The files of a folder whose names match, in order; none where there is no folder."""
    return [f"{folder}/{name}" for name in fnmatch.filter(files.list_names(folder), pattern)]


def find_parts(url: str, columns: list[str], asset: str) -> list[Part]:
    """The parts of a corpus folder in a fixed order.

    Raises:
        UserError: the folder holds no `part-*.parquet`, one is damaged or lacks a column.
    """
    urls = list_files(url)
    if not urls:
        raise UserError(
            f"{url} holds no part-*.parquet files, so there is no `{asset}` to read. Make it with: "
            f"{make_command(asset)}"
        )
    parts_of = partial(_parts_of, columns=columns, asset=asset)
    with ThreadPoolExecutor(READERS) as readers:
        return list(itertools.chain.from_iterable(readers.map(parts_of, urls)))


def _parts_of(file: str, columns: list[str], asset: str) -> list[Part]:
    try:
        with files.open_file(file) as handle:
            metadata = pq.ParquetFile(handle).metadata
    except pa.ArrowInvalid as error:
        raise UserError(
            f"{file} is not a readable Parquet file ({error}). Set what is damaged aside and "
            f"make it again with: llm-assets doctor --repair && {make_command(asset)}"
        ) from error
    names = metadata.schema.to_arrow_schema().names
    missing = [column for column in columns if column not in names]
    if missing:
        raise UserError(
            f"{file} of the `{asset}` has no column {missing[0]!r}; its columns are "
            f"{', '.join(names)}."
        )
    origin = (metadata.metadata or {}).get(ORIGIN_KEY)
    return [
        Part(
            file,
            number,
            metadata.row_group(number).num_rows,
            # The file has one origin for all of its row groups, which their numbers tell apart.
            f"{origin.decode()}/{number}" if origin else None,
        )
        for number in range(metadata.num_row_groups)
    ]


def open_parts(folders: Sequence[str], columns: Sequence[str]) -> "Dataset":
    """Open the part files of corpus folders as one table of text columns, to be filtered.

    Row groups whose statistics rule a condition out are not read. A column that a file lacks is
    null; a folder need not exist.
    """
    from pyarrow.dataset import ParquetFileFormat, ParquetFragmentScanOptions, dataset

    parts = [files.resolve(url)[1] for folder in folders for url in list_files(folder)]
    schema = pa.schema([(column, pa.string()) for column in columns])
    checked = ParquetFragmentScanOptions(page_checksum_verification=True)
    parquet = ParquetFileFormat(default_fragment_scan_options=checked)
    return dataset(parts, schema, parquet, files.resolve(folders[0])[0])


def read_table(url: str, columns: list[str] | None = None, begin: int = 0) -> pa.Table:
    """Read a whole Parquet file, and verify its checksums.

    Args:
        begin: byte of a local file at which it begins; not 0 for files of `cache.place_cached`.
    """
    if begin:
        # Mapped, so that only what is read of the file is brought into memory.
        with pa.memory_map(files.resolve(url)[1]) as mapped:
            content = pa.BufferReader(mapped.read_buffer().slice(begin))
            return pq.ParquetFile(content, page_checksum_verification=True).read(columns)
    with files.open_file(url) as file:
        return pq.ParquetFile(file, page_checksum_verification=True).read(columns)


def write_table(url: str, table: pa.Table) -> None:
    """Write a table as one Parquet file of one row group, whole or not at all.

    It is not synced here, but with all other files of what it belongs to.
    """
    files.write(url, to_parquet(table), sync=False)


def to_parquet(table: pa.Table, compression: str | dict[str, str] = "zstd") -> bytes:
    """A table as a Parquet file of one row group."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        # A row group is what one task reads.
        row_group_size=max(1, table.num_rows),
        compression=compression,
        # Values of the other columns, such as texts and hashes, hardly repeat.
        use_dictionary=[name for name in table.column_names if name in ("source", "reason")],
        write_page_checksum=True,
    )
    return sink.getvalue().to_pybytes()


class RowLocation(NamedTuple):
    """Where the rows for one part are."""

    url: str
    batch: int
    rows: int

    def read(self) -> pa.RecordBatch:
        """The rows, of the schema that they were written with."""
        with files.open_file(self.url) as file:
            return pa.ipc.open_file(file).get_batch(self.batch)


@dataclass(frozen=True)
class PartRows:
    """Where the rows for each part are, by the part's number; parts without rows are absent."""

    places: dict[int, RowLocation]

    @property
    def count(self) -> int:
        """Rows in all."""
        return sum(place.rows for place in self.places.values())

    def groups(self, size: int) -> list[list[tuple[int, RowLocation, int, int]]]:
        """The rows in the order of the parts, cut into groups of `size`.

        Returns:
            For each group its parts: `(number, place, first, last)`, where `first` and `last` are
            bounds among the part's chosen rows.
        """
        groups: list[list[tuple[int, RowLocation, int, int]]] = []
        before = 0
        for number, place in sorted(self.places.items()):
            first = 0
            while first < place.rows:
                if before % size == 0:
                    groups.append([])
                last = min(place.rows, first + size - before % size)
                groups[-1].append((number, place, first, last))
                before += last - first
                first = last
        return groups


def write_part_rows(
    folder: str, schema: pa.Schema, batches: Iterable[tuple[int, pa.RecordBatch]]
) -> PartRows:
    """Write rows into one file of a folder.

    Args:
        batches: a part's number and its rows, each part once.
    """
    # A second attempt at the same work writes another file.
    url = f"{folder}/rows-{uuid.uuid4().hex}.arrow"
    places = {}
    with files.open_file(url, "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch, (number, rows) in enumerate(batches):
            writer.write_batch(rows)
            places[number] = RowLocation(url, batch, rows.num_rows)
    return PartRows(places)


def split_rows(
    numbers: np.ndarray, offsets: Sequence[int] | np.ndarray, columns: pa.Table
) -> Iterable[tuple[int, pa.RecordBatch]]:
    """Divide rows that are numbered over all parts into those of each, for `write_part_rows`.

    Args:
        numbers: in ascending order.
        offsets: shape (parts + 1,), the number of each part's first row.
        columns: the values of each row, in the order of `numbers`.
    """
    bounds = np.searchsorted(numbers, offsets)
    for part, (first, last) in enumerate(itertools.pairwise(bounds.tolist())):
        if first < last:
            rows = pa.array(numbers[first:last] - offsets[part])
            # A record batch has one chunk per column.
            table = columns.slice(first, last - first).combine_chunks()
            arrays = [column.combine_chunks() for column in table.columns]
            yield part, pa.record_batch([rows, *arrays], ["row", *table.column_names])


SAMPLED = 200
"""Maximum number of documents that are compared after an upgrade of a library."""
_PARTS = 4


def find_rows(
    url: str, asset: str, condition: "Expression", columns: list[str], most: int
) -> list[dict[str, Any]]:
    """Find rows in a corpus folder; parts whose smallest and largest ids rule them out are skipped.

    Raises:
        UserError: as of `find_parts`; Arrow's own errors do not say what to do.
    """
    from pyarrow.dataset import dataset

    find_parts(url, columns, asset)
    parts = [files.resolve(part)[1] for part in list_files(url)]
    corpus = dataset(parts, filesystem=files.resolve(url)[0])
    # `head` stops as soon as it has enough rows; `to_table` would read all parts.
    return corpus.head(most, columns=columns, filter=condition).to_pylist()


def spread(parts: list[Part], columns: list[str]) -> pa.Table:
    """The first rows of a few parts, evenly spaced over a corpus."""
    # Spread, since parts are in the order of their sources.
    count = min(_PARTS, len(parts))
    sampled = (parts[number * len(parts) // count] for number in range(count))
    return pa.concat_tables(part.read(columns).slice(0, 10 * SAMPLED) for part in sampled)


def cached_rows(
    folder: str | None, key: str, ids: pa.ChunkedArray, make: Callable[[np.ndarray], pa.Table]
) -> pa.Table:
    """Get a row for each document, and compute only those that the cache lacks.

    Args:
        folder: of the cache; None caches nothing.
        key: of `artifacts.cache.cache_key`; together with a document's id it decides its row.
        ids: one per document. Under one key, equal ids must mean equal rows in all runs: ids of one
            corpus, or hashes of texts.
        make: computes the rows of the documents at these places in `ids`, in that order.

    Returns:
        The rows that `make` gives, in the order of `ids`. The cache also keeps those of others.
    """
    if folder is None:
        return make(np.arange(len(ids)))
    entry = read_cached(folder, key)
    cached_table = pa.ipc.open_stream(entry).read_all() if entry else None
    # Usually nothing has changed, and then no row has to be moved.
    if cached_table is not None and cached_table["id"].equals(ids):
        return cached_table.drop_columns("id")
    is_known = np.zeros(len(ids), bool)
    if cached_table is not None:
        is_known = np.asarray(pc.is_in(ids, cached_table["id"]))
    if cached_table is None or not is_known.all():
        missing = np.flatnonzero(~is_known)
        new_rows = make(missing).append_column("id", ids.take(pa.array(missing)))
        cached_table = (
            new_rows if cached_table is None else pa.concat_tables([cached_table, new_rows])
        )
        # Earlier rows stay: of two corpora that alternate, neither computes the other's rows again.
        # Of two runs that write at once the last one's rows stay, and the others are made again.
        write_cached(folder, key, to_stream(cached_table))
    return cached_table.take(pc.index_in(ids, cached_table["id"])).drop_columns("id")


def flat_bytes(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """A string or binary column as all of its bytes and where each value begins, without a copy.

    Returns:
        uint8, and int64 of shape (values + 1,).
    """
    # A slice of a column shares the buffers of the whole.
    _, offsets, content = column.buffers()
    # An empty column may have no buffers.
    bounds = np.frombuffer(offsets or bytes(4), np.int32)[column.offset :][: len(column) + 1]
    values = np.frombuffer(content or b"", np.uint8)[bounds[0] : bounds[-1]]
    return values, (bounds - bounds[0]).astype(np.int64)


def to_stream(table: pa.Table) -> bytes:
    """A table as an Arrow stream, whose columns are read without a copy."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()
