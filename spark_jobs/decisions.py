"""Carries out what was decided: the rows of each prepared part that stay become clean text."""

import hashlib
import itertools
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.kept import copy_file, is_kept, name_kept
from spark_jobs.parquet import ORIGIN_KEY, read_table, write_table

CODE_VERSION = "1"
"""Part of the name of kept text; raise it when this module writes it otherwise."""

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
    """Write which rows stay and their clusters, one Arrow record batch a part.

    Args:
        documents: all parts' documents, with `cluster`, `pinned` and `reason` (null: stays).
        part_offsets: shape (parts + 1,), where each part's documents begin.
    """
    schema = pa.schema([("row", pa.int64()), ("cluster", pa.string()), ("pinned", pa.bool_())])
    with fsspec.open(url, "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for first, last in itertools.pairwise(part_offsets):
            part = documents.slice(first, last - first)
            rows = np.flatnonzero(np.asarray(pc.is_null(part["reason"])))
            kept = part.select(["cluster", "pinned"]).take(pa.array(rows)).combine_chunks()
            columns = [rows, *(kept[name].combine_chunks() for name in ("cluster", "pinned"))]
            writer.write_batch(pa.record_batch(columns, schema))


def write_part(
    part: tuple[int, str], decisions: str, output: str, cache: str | None
) -> dict[str, Any]:
    """Write one part's clean text, unless nothing of it stays: `{"kept": URL or None}`.

    Args:
        part: its number and the URL of its prepared rows.
        decisions: what `write_decisions` wrote.
        output: folder of the clean corpus.
        cache: folder that keeps the text for the next run that decides the same of this part.
    """
    number, url = part
    with fsspec.open(decisions, "rb") as file:
        stay = pa.ipc.open_file(file).get_batch(number)
    if not stay.num_rows:
        return {"kept": None}
    target = f"{output}/part-{number:05d}.parquet"
    if cache is None:
        write_table(target, _select(url, stay))
        return {"kept": None}
    prepared = url.rpartition("/")[2]
    decided_by = {"code_version": CODE_VERSION, "prepared": prepared, "stay": _digest(stay)}
    kept = name_kept(cache, "parquet", **decided_by)
    if not is_kept(kept):
        write_table(kept, _select(url, stay))
    copy_file(kept, target)
    return {"kept": kept}


def _select(url: str, stay: pa.RecordBatch) -> pa.Table:
    table = read_table(url, ["id", "text", "source", "bytes"]).take(stay["row"])
    table = table.append_column("cluster", stay["cluster"])
    table = table.append_column("pinned", stay["pinned"])
    origin = {ORIGIN_KEY: url.rpartition("/")[2]}
    return table.select(CLEAN_SCHEMA.names).cast(CLEAN_SCHEMA).replace_schema_metadata(origin)


def _digest(batch: pa.RecordBatch) -> str:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return hashlib.blake2b(sink.getvalue(), digest_size=16).hexdigest()
