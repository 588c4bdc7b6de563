"""Carries out what was decided: the rows of each prepared part that stay become clean text."""

import itertools
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.storage import files
from spark_jobs.clean.prepare import PreparedPart
from spark_jobs.runtime.parquet import ORIGIN_KEY, read_table, write_table

CLEAN_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("cluster", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("text_hash", pa.string(), nullable=False),
        pa.field("split", pa.string(), nullable=False),
        pa.field("slice", pa.int64(), nullable=False),
        pa.field("example", pa.string()),
        pa.field("label", pa.string()),
    ]
)
"""A clean document: `cluster` names its duplicate cluster, `text_hash` its own text (see
`clean.normalize.text_hash`), `bytes` is the length of `text` in UTF-8, `split` is for ever
(`clean.splits`), `slice` says in which corpus of the lineage this text came first, from 1;
`example` is what the text is the plain text of (`artifacts.examples`), `label` its class."""
NEEDED_COLUMNS = [field.name for field in CLEAN_SCHEMA if not field.nullable]

_DECIDED = pa.schema(
    [
        ("row", pa.int64()),
        ("cluster", pa.string()),
        ("split", pa.string()),
        ("slice", pa.int64()),
    ]
)


def write_decisions(url: str, documents: pa.Table, part_offsets: np.ndarray) -> None:
    """Write which rows stay, with their clusters and splits, one Arrow record batch a part.

    Args:
        documents: all parts' documents (`clean.deduplicate.Decisions`).
        part_offsets: shape (parts + 1,), where each part's documents begin.
    """
    names = _DECIDED.names[1:]
    with files.open_file(url, "wb") as file, pa.ipc.new_file(file, _DECIDED) as writer:
        for first, last in itertools.pairwise(part_offsets):
            part = documents.slice(first, last - first)
            rows = np.flatnonzero(np.asarray(pc.is_null(part["reason"])))
            stay = part.select(names).take(pa.array(rows)).combine_chunks()
            columns = [pa.array(rows), *(stay[name].combine_chunks() for name in names)]
            writer.write_batch(pa.record_batch(columns, _DECIDED))


def write_part(part: tuple[int, PreparedPart], decisions: str, output: str) -> dict[str, Any]:
    """Write one part's clean text, unless nothing of it stays.

    Args:
        part: its number and its prepared rows.
        decisions: what `write_decisions` wrote.
        output: folder of the clean corpus.
    """
    number, prepared = part
    with files.open_file(decisions) as file:
        stay = pa.ipc.open_file(file).get_batch(number)
    if stay.num_rows:
        write_table(f"{output}/part-{number:05d}.parquet", _select(prepared, stay))
    return {}


def _select(prepared: PreparedPart, stay: pa.RecordBatch) -> pa.Table:
    columns = ["id", "text", "source", "bytes", "text_hash", "example", "label"]
    table = read_table(prepared.url, columns).take(stay["row"])
    for name in _DECIDED.names[1:]:
        table = table.append_column(name, stay[name])
    origin = {ORIGIN_KEY: prepared.origin}
    return table.select(CLEAN_SCHEMA.names).cast(CLEAN_SCHEMA).replace_schema_metadata(origin)
