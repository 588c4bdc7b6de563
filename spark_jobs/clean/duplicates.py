"""The list of dropped copies: what each was found a copy of, and which document is kept for it."""

from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.runtime import parquet
from spark_jobs.runtime.tasks import JobRun, map_tasks

EXACT, NEAR = "exact_duplicate", "near_duplicate"

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

ROWS_IN_FILE = 500_000
"""Rows of a list's file, which the task that writes it holds in memory."""


def write_duplicates(run: JobRun, copies: parquet.PartRows, folder: str) -> None:
    """Write the list as `duplicates-NNNNN.parquet`, one file per task.

    Args:
        copies: rows of `DUPLICATE_SCHEMA`; their numbers give the order, which is that of the ids.
    """
    groups = list(enumerate(copies.groups(ROWS_IN_FILE)))
    map_tasks(run.spark, "listing copies", groups, partial(_write_file, folder=folder), run.report)


def _write_file(
    group: tuple[int, list[tuple[int, parquet.RowLocation, int, int]]], folder: str
) -> dict[str, Any]:
    number, pieces = group
    batches = [place.read().slice(first, last - first) for _, place, first, last in pieces]
    copies = pa.Table.from_batches(batches, DUPLICATE_SCHEMA).combine_chunks()
    parquet.write_table(f"{folder}/duplicates-{number:05d}.parquet", copies)
    return {}


def find_duplicates(clean_corpus: str, column: str, values: pa.Array) -> pa.Table:
    """Find the dropped copies with one of some values in a column: rows of `DUPLICATE_SCHEMA`."""
    tables = [DUPLICATE_SCHEMA.empty_table()]
    for url in parquet.list_files(clean_corpus, "duplicates*.parquet"):
        copies = parquet.read_table(url, DUPLICATE_SCHEMA.names)
        tables.append(copies.filter(pc.is_in(copies[column], values)).cast(DUPLICATE_SCHEMA))
    return pa.concat_tables(tables)
