"""Carries out what was decided: the rows of each prepared part that stay become clean text."""

from typing import Any

import pyarrow as pa

from spark_jobs.clean.decide.decider import DECIDED_SCHEMA
from spark_jobs.clean.part_rows import Place
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


def write_part(part: tuple[int, PreparedPart, Place], output: str) -> dict[str, Any]:
    """Write one part's clean text.

    Args:
        part: its number, its prepared rows, and which of them stay (`decider.DECIDED_SCHEMA`).
        output: folder of the clean corpus.
    """
    number, prepared, stay = part
    write_table(f"{output}/part-{number:05d}.parquet", _select(prepared, stay.read()))
    return {}


def _select(prepared: PreparedPart, stay: pa.RecordBatch) -> pa.Table:
    columns = ["id", "text", "source", "bytes", "text_hash", "example", "label"]
    table = read_table(prepared.url, columns).take(stay["row"])
    for name in DECIDED_SCHEMA.names[1:]:
        table = table.append_column(name, stay[name])
    origin = {ORIGIN_KEY: prepared.origin}
    return table.select(CLEAN_SCHEMA.names).cast(CLEAN_SCHEMA).replace_schema_metadata(origin)
