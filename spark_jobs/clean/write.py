"""Writes the clean text: of each prepared part, the rows that were decided to stay."""

import hashlib
from collections import Counter
from typing import Any

import pyarrow as pa

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
    part: tuple[int, PreparedPart, RowLocation],
    classifiers: list[ClassifierSettings],
    output: str,
    key: str,
    cache: str | None,
) -> dict[str, Any]:
    """Write one part's clean text; return `labels`, by classifier and label the documents.

    Args:
        part: its number, its prepared rows, and which of them stay (`decider.DECIDED_SCHEMA`).
        key: of `writing_key`.
        cache: folder of what earlier runs wrote; most parts of a grown corpus are unchanged.
    """
    number, prepared, place = part
    stay = place.read()

    def make() -> bytes:
        # Without `row`, which only says where in the prepared part the document is.
        schema, decided = clean_schema(classifiers), DECIDED_SCHEMA.names[1:]
        columns = [name for name in schema.names if name not in decided]
        table = prepared.read(columns).take(stay["row"])
        for name in decided:
            table = table.append_column(name, stay[name])
        origin = {ORIGIN_KEY: prepared.origin}
        return to_parquet(table.select(schema.names).cast(schema).replace_schema_metadata(origin))

    url = f"{output}/part-{number:05d}.parquet"
    # Equal rows and equal decisions about them give an equal file, whatever other parts hold.
    identity = hashlib.sha256(prepared.origin.encode() + stay.serialize())
    # Not synced by itself, but with the whole artifact when it is finished.
    files.write(url, cached(cache, f"{key}-{identity.hexdigest()}", make), sync=False)
    # From the file, since what came from the cache was not made here.
    labels = read_table(url, [classifier.name for classifier in classifiers])
    return {"labels": {name: Counter(labels[name].to_pylist()) for name in labels.column_names}}


def writing_key(classifiers: list[ClassifierSettings]) -> str:
    """The cache key of clean text, to which a part's content and decisions are added."""
    columns = clean_schema(classifiers).names
    return cache_key("clean text", __name__, ["numpy", "pyarrow"], columns=columns)


def clean_schema(classifiers: list[ClassifierSettings]) -> pa.Schema:
    """`CLEAN_SCHEMA`, and the columns of the classifiers' labels."""
    return pa.schema([*CLEAN_SCHEMA, *(pa.field(*field) for field in label_fields(classifiers))])
