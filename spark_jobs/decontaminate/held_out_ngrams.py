"""The n-grams of held-out texts, which no training text may repeat."""

import uuid
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from artifacts.progress import Report
from artifacts.shards.format import in_split
from spark_jobs.decontaminate.overlap import join_ngrams, load_ngrams, save_ngrams, text_ngrams
from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.tasks import map_tasks


def save_held_out_ngrams(
    spark: SparkSession,
    parts: list[Part],
    size: int,
    folder: str,
    report: Report,
    evaluation: str | None,
) -> str:
    """Write the n-grams of all reference texts; gives the URL, whose name follows from them.

    Args:
        parts: those of the clean corpus with held-out documents.
        size: words in an n-gram.
        evaluation: URL of the n-grams of the evaluation texts.
    """
    work = partial(_save, size=size, folder=f"{folder}/{uuid.uuid4().hex}")
    found = map_tasks(spark, "reading held-out texts", parts, work, report)
    urls = [record["url"] for record in found] + ([evaluation] if evaluation else [])
    return save_ngrams(folder, join_ngrams(map(load_ngrams, urls)))


def _save(part: Part, size: int, folder: str) -> dict[str, Any]:
    table = part.read(["text", "split"])
    chosen = table["text"].filter(pa.array(in_split(table, "held_out")))
    return {"url": save_ngrams(folder, text_ngrams(chosen.to_pylist(), size))}
