"""Carries out what was decided: the rows of each prepared part that stay become clean text."""

import itertools
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spark_jobs.parquet import open_writer, write_table
from spark_jobs.prepare import read_prepared

CLEAN_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("cluster", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("pinned", pa.bool_(), nullable=False),
    ]
)
"""A clean document: `cluster` names its duplicate cluster (see `spark_jobs.text.cluster_hash`),
`bytes` is the length of `text` in UTF-8, `pinned` whether an earlier held-out set holds it."""


def write_decisions(url: str, documents: pa.Table, part_offsets: np.ndarray) -> None:
    """Write which rows stay and their clusters, one row group a part.

    Args:
        documents: all parts' documents, with `cluster`, `pinned` and `reason` (null: stays).
        part_offsets: shape (parts + 1,), where each part's documents begin.
    """
    schema = pa.schema([("row", pa.int64()), ("cluster", pa.string()), ("pinned", pa.bool_())])
    with open_writer(url, schema) as writer:
        for first, last in itertools.pairwise(part_offsets):
            part = documents.slice(first, last - first)
            rows = np.flatnonzero(np.asarray(pc.is_null(part["reason"])))
            kept = part.select(["cluster", "pinned"]).take(pa.array(rows))
            table = kept.add_column(0, "row", pa.array(rows, pa.int64())).cast(schema)
            writer.write_table(table, row_group_size=max(1, len(rows)))


def write_part(part: tuple[int, str], decisions: str, output: str) -> dict[str, Any]:
    """Write one part's clean text, unless nothing of it stays.

    Args:
        part: its number and the URL of its prepared rows.
        decisions: what `write_decisions` wrote.
        output: folder of the clean corpus.
    """
    number, url = part
    with fsspec.open(decisions, "rb") as file:
        kept = pq.ParquetFile(file).read_row_group(number)
    if kept.num_rows:
        table = read_prepared(url, ["id", "text", "source", "bytes"]).take(kept["row"])
        table = table.append_column("cluster", kept["cluster"])
        table = table.append_column("pinned", kept["pinned"])
        table = table.select(CLEAN_SCHEMA.names).cast(CLEAN_SCHEMA)
        write_table(f"{output}/part-{number:05d}.parquet", table)
    return {}
