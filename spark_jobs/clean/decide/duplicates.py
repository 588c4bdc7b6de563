"""The list of the copies that were dropped, each with the document that it was found a copy of."""

import fnmatch
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from artifacts.progress import Report
from artifacts.storage import files
from spark_jobs.runtime.parquet import read_table, write_table
from spark_jobs.runtime.part_rows import PartRows, Place
from spark_jobs.runtime.tasks import map_tasks

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
"""Which the task that writes it holds."""


def write_duplicates(spark: SparkSession, copies: PartRows, folder: str, report: Report) -> None:
    """Write the list as `duplicates-NNNNN.parquet`, a task for each file.

    Args:
        copies: rows of `DUPLICATE_SCHEMA`; their numbers give the order, which is that of the ids.
    """
    groups = list(enumerate(copies.groups(ROWS_IN_FILE)))
    map_tasks(spark, "listing copies", groups, partial(_write_file, folder=folder), report)


def _write_file(
    group: tuple[int, list[tuple[int, Place, int, int]]], folder: str
) -> dict[str, Any]:
    number, pieces = group
    batches = [place.read().slice(first, last - first) for _, place, first, last in pieces]
    copies = pa.Table.from_batches(batches, DUPLICATE_SCHEMA).combine_chunks()
    write_table(f"{folder}/duplicates-{number:05d}.parquet", copies)
    return {}


def find_duplicates(clean_corpus: str, column: str, values: pa.Array) -> pa.Table:
    """The dropped copies that have one of some values in a column; rows of `DUPLICATE_SCHEMA`."""
    found = [DUPLICATE_SCHEMA.empty_table()]
    for name in fnmatch.filter(files.list_names(clean_corpus), "duplicates*.parquet"):
        copies = read_table(f"{clean_corpus}/{name}", DUPLICATE_SCHEMA.names)
        found.append(copies.filter(pc.is_in(copies[column], values)).cast(DUPLICATE_SCHEMA))
    return pa.concat_tables(found)
