"""The list of the copies that were dropped, each with the document that it was found a copy of."""

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.storage import files
from spark_jobs.runtime.parquet import parquet_options

EXACT, NEAR = "exact_duplicate", "near_duplicate"

DUPLICATES_NAME = "duplicates.parquet"
DUPLICATE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("survivor", pa.string()),
        ("cluster", pa.string()),
        ("reason", pa.string()),
        ("neighbor", pa.string()),
        ("similarity", pa.float64()),
    ]
)
"""A dropped copy: the document kept in its place, and the most similar document that was compared
with it (Jaccard similarity of the shingle sets; 1 for an exact copy)."""

ROWS_IN_GROUP = 1_000_000
"""Of a row group, which is what writing the list holds at a time."""


def write_duplicates(url: str, batches: Iterable[pa.RecordBatch]) -> None:
    """Write the list as one Parquet file.

    Args:
        batches: rows of `DUPLICATE_SCHEMA` by id, cut in any way.
    """
    options = parquet_options(DUPLICATE_SCHEMA)
    with (
        files.open_file(url, "wb") as file,
        pq.ParquetWriter(file, DUPLICATE_SCHEMA, **options) as writer,
    ):
        for table in _row_groups(batches):
            writer.write_table(table, row_group_size=max(1, table.num_rows))


def _row_groups(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.Table]:
    """The same rows, a full row group at a time; none at all are one group without rows."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in filter(len, batches):
        while rows + batch.num_rows >= ROWS_IN_GROUP:
            room = ROWS_IN_GROUP - rows
            yield pa.Table.from_batches([*held, batch.slice(0, room)]).combine_chunks()
            batch, held, rows = batch.slice(room), [], 0
        held.append(batch)
        rows += batch.num_rows
    if rows or not held:
        yield pa.Table.from_batches(held, DUPLICATE_SCHEMA).combine_chunks()
