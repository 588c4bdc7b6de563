"""Carries out what was decided: the rows of each prepared part that stay become clean text."""

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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


def write_part(part: tuple[int, PreparedPart, Place, Place | None], output: str) -> dict[str, Any]:
    """Write one part's clean text.

    Args:
        part: its number, its prepared rows, which of them stay (`decider.DECIDED_SCHEMA`), and the
            texts of those that lost some of it (`repeated.trim.TRIMMED_SCHEMA`).
        output: folder of the clean corpus.
    """
    number, prepared, stay, texts = part
    table = _select(prepared, stay.read())
    if texts:
        table = _trimmed(table, stay.read(), texts.read(), prepared.origin)
    write_table(f"{output}/part-{number:05d}.parquet", table)
    return {}


def _select(prepared: PreparedPart, stay: pa.RecordBatch) -> pa.Table:
    columns = ["id", "text", "source", "bytes", "text_hash", "example", "label"]
    table = read_table(prepared.url, columns).take(stay["row"])
    for name in DECIDED_SCHEMA.names[1:]:
        table = table.append_column(name, stay[name])
    origin = {ORIGIN_KEY: prepared.origin}
    return table.select(CLEAN_SCHEMA.names).cast(CLEAN_SCHEMA).replace_schema_metadata(origin)


def _trimmed(table: pa.Table, stay: pa.RecordBatch, texts: pa.RecordBatch, origin: str) -> pa.Table:
    """The table with some texts replaced, and with an origin that says so."""
    lost = pa.array(np.isin(stay["row"], texts["row"]))
    text = pc.replace_with_mask(table["text"].combine_chunks(), lost, texts["text"])
    sizes = pc.binary_length(text).cast(pa.int64())
    for name, column in (("text", text), ("bytes", sizes)):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, CLEAN_SCHEMA.field(name), column)
    digest = hashlib.sha256(origin.encode())
    for row in texts.to_pylist():
        digest.update(repr(row).encode())
    return table.replace_schema_metadata({ORIGIN_KEY: digest.hexdigest()})
