"""The documents that were left out since they overlap too much with reference text, listed."""

import fnmatch
from collections import Counter
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from artifacts.progress import Report
from artifacts.storage import files
from spark_jobs.runtime.parquet import read_table, write_table
from spark_jobs.runtime.tasks import map_tasks
from spark_jobs.tokenize.shuffle import Range, read_ranges

DOCUMENTS_PER_LIST = 20_000_000
"""Of the corpus; of the default one, 1.3 % are left out."""


def list_removed(
    spark: SparkSession, lists: list[tuple[int, list[Range]]], folder: str, report: Report
) -> dict[str, int]:
    """Write the lists as `overlaps_held_out-NNNNN.parquet` beside the shards, each by id.

    Args:
        lists: the number of each, and where its documents are.

    Returns:
        The split that the documents were of, to how many.
    """
    work = partial(_write_list, folder=folder)
    counts: Counter[str] = Counter()
    for record in map_tasks(spark, "listing what overlaps", lists, work, report):
        counts.update(record)
    return dict(counts)


def _write_list(one: tuple[int, list[Range]], folder: str) -> dict[str, Any]:
    number, ranges = one
    removed = read_ranges(ranges).sort_by("id")
    write_table(f"{folder}/overlaps_held_out-{number:05d}.parquet", removed)
    return dict(Counter(removed["split"].to_pylist()))


def find_overlap(folder: str, identifier: str) -> float | None:
    """The share of a document that is reference text, where it was left out for that."""
    for name in fnmatch.filter(files.list_names(folder), "overlaps_held_out*.parquet"):
        removed = read_table(f"{folder}/{name}", ["id", "overlap"])
        row = pc.index(removed["id"], pa.scalar(identifier)).as_py()
        if row >= 0:
            return float(removed["overlap"][row].as_py())
    return None
