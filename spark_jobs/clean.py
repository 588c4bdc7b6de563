"""Raw text to clean text: normalised, bounded in length, without copies.

Run as a program: `python -m spark_jobs.clean --spec spec.json`.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict
from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from artifacts.errors import UserError
from spark_jobs import entry
from spark_jobs.parquet import read_corpus, write_parts
from spark_jobs.progress import progress
from spark_jobs.settings import CleanCorpusSettings
from spark_jobs.text import cluster_hash, fold, normalise

CODE_VERSION = "1"

EXAMPLE_CHARACTERS = 160

CLEAN_SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        pa.field("cluster", pa.string(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
    ]
)
"""A clean document: `cluster` names its duplicate cluster (see `spark_jobs.text.cluster_hash`),
`bytes` is the length of `text` in UTF-8."""

_NORMALISED = "id string, text string, source string, cluster string, bytes long, reason string"


class CleanSpec(BaseModel):
    """One run of this job."""

    model_config = ConfigDict(extra="forbid")

    raw_corpus: str
    """Folder of the raw corpus."""
    output: str
    """Folder that the clean corpus is written into."""
    settings: CleanCorpusSettings


def run(
    spark: SparkSession, spec: CleanSpec, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Write the clean corpus, `part-NNNNN.parquet` of `CLEAN_SCHEMA`; return the stats.

    The survivor of a duplicate cluster is its longest document, of several the one with the
    smallest id, however the text is partitioned.

    Returns:
        `documents`, `bytes`, `documents_read`, `bytes_read`, `dropped` (reason to documents),
        `dropped_bytes`, `dropped_examples` (reason to a few `id` and `text` beginnings), `clusters`
        (kept), `sources` (name to documents kept).

    Raises:
        UserError: there is no raw corpus, an id comes twice, or no document is left.
    """
    raw = read_corpus(spark, spec.raw_corpus, ["id", "text", "source"], "raw_corpus")
    normalised = raw.mapInArrow(_normaliser(spec.settings), _NORMALISED)
    normalised = normalised.persist(StorageLevel.MEMORY_AND_DISK)
    try:
        with progress(spark.sparkContext, "normalising and comparing", report):
            _refuse_repeated_ids(normalised)
            judged = _mark_copies(normalised).persist(StorageLevel.MEMORY_AND_DISK)
            counts = judged.groupBy("reason", "source").agg(
                F.count("*").alias("documents"), F.sum("bytes").alias("bytes")
            )
            rows = [row.asDict() for row in counts.collect()]
        kept_documents = sum(row["documents"] for row in rows if row["reason"] is None)
        if not kept_documents:
            raise UserError(_nothing_left(rows, spec.settings))
        with progress(spark.sparkContext, "writing clean text", report):
            write_parts(judged.where("reason is null"), spec.output, CLEAN_SCHEMA)
        stats = _stats(rows) | {
            "dropped_examples": _examples(judged, spec.settings.examples_per_reason)
        }
        judged.unpersist()
    finally:
        normalised.unpersist()
    report(
        f"{stats['documents']:,} of {stats['documents_read']:,} documents kept, "
        f"{stats['bytes'] / 1e6:,.1f} MB"
    )
    return stats


def _normaliser(
    settings: CleanCorpusSettings,
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def normalise_batches(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            texts = [
                normalise(text or "", settings.unicode_form) for text in batch["text"].to_pylist()
            ]
            yield pa.RecordBatch.from_arrays(
                [
                    batch["id"],
                    pa.array(texts, pa.string()),
                    batch["source"],
                    pa.array([cluster_hash(fold(t), settings.split_seed) for t in texts]),
                    pa.array([len(t.encode()) for t in texts], pa.int64()),
                    pa.array([_length_fault(t, settings) for t in texts], pa.string()),
                ],
                names=["id", "text", "source", "cluster", "bytes", "reason"],
            )

    return normalise_batches


def _length_fault(text: str, settings: CleanCorpusSettings) -> str | None:
    if not text:
        return "empty"
    if len(text) < settings.minimum_characters:
        return "too_short"
    if len(text) > settings.maximum_characters:
        return "too_long"
    return None


def _refuse_repeated_ids(documents: DataFrame) -> None:
    repeated = documents.groupBy("id").count().where("count > 1").orderBy("id").limit(3).collect()
    if repeated:
        named = ", ".join(f"{row['id']!r} ({row['count']} times)" for row in repeated)
        raise UserError(
            f"The raw corpus holds the same id more than once: {named}. Every document needs an "
            "id of its own: choose another `id_column`, or leave it out."
        )


def _mark_copies(documents: DataFrame) -> DataFrame:
    """Give every exact copy but its cluster's survivor the reason `exact_duplicate`."""
    sound = documents.where("reason is null")
    survivors = sound.groupBy("cluster").agg(
        F.min(F.struct((-F.length("text")).alias("length"), F.col("id"))).alias("best")
    )
    survivors = survivors.select("cluster", F.col("best.id").alias("survivor"))
    joined = documents.join(survivors, "cluster", "left")
    copy = F.when(F.col("id") != F.col("survivor"), F.lit("exact_duplicate"))
    return joined.withColumn("reason", F.coalesce("reason", copy)).drop("survivor")


def _examples(judged: DataFrame, count: int) -> dict[str, list[dict[str, str]]]:
    order = Window.partitionBy("reason").orderBy("id")
    rows = (
        judged.where("reason is not null")
        .select("reason", "id", F.substring("text", 1, EXAMPLE_CHARACTERS).alias("text"))
        .withColumn("place", F.row_number().over(order))
        .where(F.col("place") <= count)
        .orderBy("reason", "id")
        .collect()
    )
    examples: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        examples.setdefault(row["reason"], []).append({"id": row["id"], "text": row["text"]})
    return examples


def _stats(rows: list[dict[str, Any]]) -> dict[str, Any]:
    kept = [row for row in rows if row["reason"] is None]
    reasons = sorted({row["reason"] for row in rows if row["reason"]})

    def total(field: str, reason: str | None) -> int:
        return sum(row[field] for row in rows if row["reason"] == reason)

    return {
        "documents": total("documents", None),
        "bytes": total("bytes", None),
        "documents_read": sum(row["documents"] for row in rows),
        "bytes_read": sum(row["bytes"] for row in rows),
        "dropped": {reason: total("documents", reason) for reason in reasons},
        "dropped_bytes": {reason: total("bytes", reason) for reason in reasons},
        "clusters": total("documents", None),
        "sources": {row["source"]: row["documents"] for row in sorted(kept, key=_source)},
    }


def _source(row: dict[str, Any]) -> str:
    return str(row["source"])


def _nothing_left(rows: list[dict[str, Any]], settings: CleanCorpusSettings) -> str:
    reasons = {row["reason"] for row in rows}
    counts = ", ".join(
        f"{reason}: {sum(r['documents'] for r in rows if r['reason'] == reason):,}"
        for reason in sorted(reasons)
    )
    return (
        "No document is left after cleaning"
        + (f" ({counts})" if counts else ", since the raw corpus is empty")
        + f". Give `raw_corpus` more text, or lower `clean_corpus.minimum_characters` (now "
        f"{settings.minimum_characters})."
    )


if __name__ == "__main__":
    sys.exit(entry.main(CleanSpec, run))
