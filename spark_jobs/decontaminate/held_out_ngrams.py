"""The n-grams of held-out texts, which no training text may repeat."""

import uuid
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from artifacts.progress import Report
from spark_jobs.decontaminate.overlap import join_ngrams, load_ngrams, save_ngrams, text_ngrams
from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.tasks import map_tasks


def save_held_out_ngrams(
    spark: SparkSession,
    held_out: list[tuple[Part, list[str]]],
    size: int,
    folder: str,
    report: Report,
    evaluation: str | None,
) -> str:
    """Write the n-grams of all reference texts; gives the URL, whose name follows from them.

    Args:
        held_out: parts with the ids of their held-out documents.
        size: words in an n-gram.
        evaluation: URL of the n-grams of the evaluation texts.
    """
    texts = [(part, ids) for part, ids in held_out if ids]
    work = partial(_save, size=size, folder=f"{folder}/{uuid.uuid4().hex}")
    found = map_tasks(spark, "reading held-out texts", texts, work, report)
    urls = [record["url"] for record in found] + ([evaluation] if evaluation else [])
    return save_ngrams(folder, join_ngrams(map(load_ngrams, urls)))


def _save(held_out: tuple[Part, list[str]], size: int, folder: str) -> dict[str, Any]:
    part, ids = held_out
    table = part.read(["id", "text"])
    chosen = table["text"].filter(pc.is_in(table["id"], pa.array(ids)))
    return {"url": save_ngrams(folder, text_ngrams(chosen.to_pylist(), size))}
