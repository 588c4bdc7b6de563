"""The n-grams of reference texts on their way to the training text: two ways, the same overlaps.

Up to so much held-out text every task is sent all of them, some 30 bytes for each of their words.
Past it Spark joins reference texts and training text by their n-grams: so a task gets those alone
that its part holds, and nobody holds all of them.
"""

import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from artifacts.progress import Report
from spark_jobs.decontaminate.overlap import (
    COMMON_TEXTS,
    NGrams,
    group_ngrams,
    join_ngrams,
    load_ngrams,
    save_ngrams,
)
from spark_jobs.decontaminate.part_ngrams import PartNGrams
from spark_jobs.decontaminate.part_overlaps import PartOverlaps
from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.part_rows import PartRows
from spark_jobs.runtime.tasks import map_tasks
from spark_jobs.runtime.work import Work

BYTES_PER_WORD = 6
"""Of text, the blank included; a text has nearly as many n-grams as words."""
REFERENCE_SCHEMA = pa.schema([("ngram", pa.int64()), ("text", pa.int64()), ("size", pa.int64())])
"""An n-gram of a reference text, and how many different ones the text has; `SET_PHRASE` in place of
the text of one that is in more texts than count."""
SET_PHRASE = -1
HELD_SCHEMA = pa.schema([("ngram", pa.int64()), ("part", pa.int64())])
"""An n-gram that the training text of a part holds."""
_TEXTS_IN_PART = 1 << 32


class References(ABC):
    """The n-grams of all held-out and evaluation texts."""

    @abstractmethod
    def of_part(self, number: int) -> NGrams:
        """Those that a part's training text holds, of each text that holds them.

        There may be others among them, which change no overlap.
        """


@dataclass(frozen=True)
class Comparison:
    """What is compared."""

    spark: SparkSession
    parts: list[Part]
    """Of the clean corpus; their numbers are those that `References` is asked by."""
    with_held_out: list[Part]
    """Those with held-out documents."""
    evaluation: str | None
    """URL of the n-grams of the evaluation texts (`overlap.save_ngrams`)."""
    overlaps: PartOverlaps
    scratch: str
    """Folder for what is needed only until the job ends."""
    report: Report


def find_references(
    comparison: Comparison, text_bytes: int, held_out_bytes: int, most_bytes: int
) -> References:
    """The n-grams of the reference texts, for so much text in all and so much that is held out.

    Both ways give the same overlaps, so `most_bytes` is no part of what the shards are.
    """
    if held_out_bytes <= most_bytes:
        return _send_references(comparison)
    return _join_references(comparison, text_bytes // BYTES_PER_WORD)


@dataclass(frozen=True)
class SentReferences(References):
    """All n-grams in one file, which a worker reads once."""

    url: str

    def of_part(self, number: int) -> NGrams:
        return load_ngrams(self.url)


def _send_references(comparison: Comparison) -> References:
    """Gather the n-grams on the driver, and write them for all tasks."""
    folder = comparison.scratch
    gather = partial(
        _write, ngrams=comparison.overlaps.ngrams, folder=f"{folder}/{uuid.uuid4().hex}"
    )
    spark, report = comparison.spark, comparison.report
    found = map_tasks(spark, "reading held-out texts", comparison.with_held_out, gather, report)
    urls = [record["url"] for record in found]
    urls += [comparison.evaluation] if comparison.evaluation else []
    url = save_ngrams(folder, join_ngrams(map(load_ngrams, urls)))
    comparison.overlaps.remember(url)
    return SentReferences(url)


def _write(part: Part, ngrams: PartNGrams, folder: str) -> dict[str, Any]:
    return {"url": save_ngrams(folder, group_ngrams(ngrams.of_held_out(part)))}


@dataclass(frozen=True)
class JoinedReferences(References):
    """The n-grams that each part holds, apart."""

    rows: PartRows
    """Of `REFERENCE_SCHEMA`, by the number of the part."""

    def of_part(self, number: int) -> NGrams:
        place = self.rows.places.get(number)
        found = place.read() if place else REFERENCE_SCHEMA.empty_table()
        return _as_ngrams(*(np.asarray(found[name]) for name in REFERENCE_SCHEMA.names))


def _join_references(comparison: Comparison, rows: int) -> References:
    """Join over about so many n-grams."""
    work = Work(comparison.spark, rows, comparison.scratch, comparison.report)
    evaluation = [comparison.evaluation] if comparison.evaluation else []
    ngrams = comparison.overlaps.ngrams
    gather = partial(_gather, ngrams=ngrams)
    references = work.over_parts([*comparison.with_held_out, *evaluation], gather, REFERENCE_SCHEMA)
    list_held = partial(_list_held, ngrams=ngrams)
    held = work.over_parts(comparison.parts, list_held, HELD_SCHEMA)
    found = held.join(_without_set_phrases(work, references), "ngram")
    return JoinedReferences(work.by_part(found, REFERENCE_SCHEMA, "finding held-out n-grams"))


def _without_set_phrases(work: Work, references: DataFrame) -> DataFrame:
    """The same rows, but one for an n-gram that is a set phrase (`overlap.COMMON_TEXTS`)."""
    place = F.row_number().over(Window.partitionBy("ngram").orderBy("text")).alias("place")
    first = references.select("*", place).where(F.col("place") <= COMMON_TEXTS + 1)
    first = work.keep(first, "reading held-out texts")
    common = first.where(F.col("place") > COMMON_TEXTS)
    phrases = common.select("ngram", F.lit(SET_PHRASE).alias("text"), F.lit(1).alias("size"))
    return first.drop("place").join(phrases, "ngram", "left_anti").union(phrases)


def _gather(number: int, source: Part | str, ngrams: PartNGrams) -> pa.Table:
    """The n-grams of a part's held-out texts, or of the evaluation texts at a URL."""
    if isinstance(source, Part):
        found = group_ngrams(ngrams.of_held_out(source))
    else:
        found = load_ngrams(source)
    texts = number * _TEXTS_IN_PART + found.texts
    columns = [found.hashes.view(np.int64), texts, found.sizes[found.texts]]
    return pa.Table.from_arrays(list(map(pa.array, columns)), schema=REFERENCE_SCHEMA)


def _list_held(number: int, part: Part, ngrams: PartNGrams) -> pa.Table:
    hashes = ngrams.of_training(part).view(np.int64)
    columns = [pa.array(hashes), pa.array(np.full(len(hashes), number))]
    return pa.Table.from_arrays(columns, schema=HELD_SCHEMA)


def _as_ngrams(ngrams: np.ndarray, texts: np.ndarray, sizes: np.ndarray) -> NGrams:
    """Rows of `REFERENCE_SCHEMA`, set phrases as often as makes them known as such."""
    times = np.where(texts == SET_PHRASE, COMMON_TEXTS + 1, 1)
    hashes, texts, sizes = (np.repeat(one, times) for one in (ngrams.view(np.uint64), texts, sizes))
    _, first, numbers = np.unique(texts, return_index=True, return_inverse=True)
    order = np.argsort(hashes, kind="stable")
    return NGrams(hashes[order], numbers[order], sizes[first])
