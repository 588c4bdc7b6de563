"""Carries out what was decided: the rows of each prepared part that stay become clean text."""

import hashlib
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.cache import cache_key, cached
from artifacts.storage import files
from spark_jobs.clean.classify import label_fields
from spark_jobs.clean.decide.decider import DECIDED_SCHEMA
from spark_jobs.clean.prepare import PreparedPart
from spark_jobs.runtime.parquet import ORIGIN_KEY, RowLocation, read_table, to_parquet
from spark_jobs.settings import ClassifierSettings

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
`text.text_hash`), `bytes` is the length of `text` in UTF-8, `split` is for ever
(`clean.history`), `slice` says in which corpus of the lineage this text came first, from 1;
`example` is what the text is the plain text of (`artifacts.examples`), `label` its class."""
NEEDED_COLUMNS = [field.name for field in CLEAN_SCHEMA if not field.nullable]


def write_part(
    part: tuple[int, PreparedPart, RowLocation, RowLocation | None],
    classifiers: list[ClassifierSettings],
    output: str,
    key: str,
    cache: str | None,
) -> dict[str, Any]:
    """Write one part's clean text: `labels`, each classifier's name to labels to documents.

    Args:
        part: its number, its prepared rows, which of them stay (`decider.DECIDED_SCHEMA`), and the
            texts of those that lost some of it (`repeated.TRIMMED_SCHEMA`).
        classifiers: whose columns the text has.
        output: folder of the clean corpus.
        key: of `writing_key`.
        cache: folder of what earlier runs wrote; most parts of a corpus that grew are as they were.
    """
    number, prepared, place, place_of_texts = part
    stay, texts = place.read(), place_of_texts.read() if place_of_texts else None
    schema = clean_schema(classifiers)

    def make() -> bytes:
        table = _select(prepared, stay, schema)
        return to_parquet(_trimmed(table, stay, texts, prepared.origin) if texts else table)

    url = f"{output}/part-{number:05d}.parquet"
    chosen = hashlib.sha256(prepared.origin.encode())
    for rows in (stay, texts):
        chosen.update(rows.serialize() if rows else b"")
    files.write(url, cached(cache, f"{key}-{chosen.hexdigest()}", make), sync=False)
    labels = read_table(url, [one.name for one in classifiers])
    return {"labels": {name: Counter(labels[name].to_pylist()) for name in labels.column_names}}


def writing_key(classifiers: list[ClassifierSettings]) -> str:
    """The cache's key of clean text, but for what its part was made of and what stays of it."""
    columns = clean_schema(classifiers).names
    return cache_key("clean text", __name__, ["numpy", "pyarrow"], columns=columns)


def clean_schema(classifiers: list[ClassifierSettings]) -> pa.Schema:
    """`CLEAN_SCHEMA`, and the columns of the classifiers' labels."""
    return pa.schema([*CLEAN_SCHEMA, *(pa.field(*field) for field in label_fields(classifiers))])


def _select(prepared: PreparedPart, stay: pa.RecordBatch, schema: pa.Schema) -> pa.Table:
    decided = DECIDED_SCHEMA.names[1:]
    columns = [name for name in schema.names if name not in decided]
    table = prepared.read(columns).take(stay["row"])
    for name in decided:
        table = table.append_column(name, stay[name])
    origin = {ORIGIN_KEY: prepared.origin}
    return table.select(schema.names).cast(schema).replace_schema_metadata(origin)


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
