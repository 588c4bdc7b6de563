"""The documents that were left out since they overlap too much with reference text, listed."""

import fnmatch
from collections import Counter

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.storage import files
from spark_jobs.runtime.parquet import read_table, write_table

DOCUMENTS_PER_LIST = 20_000_000
"""Of the corpus; of the default one, 1.3 % are left out."""

LISTED_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("cluster", pa.string()),
        ("bytes", pa.int64()),
        ("split", pa.string()),
        ("overlap", pa.float64()),
    ]
)
"""A document that is left out, and the share of it that is reference text."""


def write_list(number: int, removed: pa.Table, folder: str) -> dict[str, int]:
    """Write documents as `overlaps_held_out-NNNNN.parquet` beside the shards, by id.

    Returns:
        The split that they were of, to how many.
    """
    listed = removed.sort_by("id")
    write_table(f"{folder}/overlaps_held_out-{number:05d}.parquet", listed)
    return dict(Counter(listed["split"].to_pylist()))


def find_overlap(folder: str, identifier: str) -> float | None:
    """The share of a document that is reference text, where it was left out for that."""
    for name in fnmatch.filter(files.list_names(folder), "overlaps_held_out*.parquet"):
        removed = read_table(f"{folder}/{name}", ["id", "overlap"])
        row = pc.index(removed["id"], pa.scalar(identifier)).as_py()
        if row >= 0:
            return float(removed["overlap"][row].as_py())
    return None
