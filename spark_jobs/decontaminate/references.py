"""How the n-grams of reference texts reach the training text, in two ways with the same overlaps.

Up to a limit of held-out text, every task gets all of them, some 30 bytes for each word. Beyond it,
Spark joins reference text and training text by n-gram: a task gets only those that its part holds,
and no process holds all of them.
"""

import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from spark_jobs.decontaminate.ngrams import (
    COMMON_TEXTS,
    NGrams,
    group_ngrams,
    join_ngrams,
    load_ngrams,
    save_ngrams,
)
from spark_jobs.decontaminate.part_overlaps import PartOverlaps
from spark_jobs.runtime.parquet import Part, RowLocation
from spark_jobs.runtime.tasks import JobRun, Work, map_tasks

BYTES_PER_WORD = 6
"""Of text, including the space; a text has nearly as many n-grams as words."""
REFERENCE_SCHEMA = pa.schema([("ngram", pa.int64()), ("text", pa.int64()), ("size", pa.int64())])
"""An n-gram of a reference text, and how many different ones the text has; `SET_PHRASE` in place of
the text of one that is in more texts than count."""
SET_PHRASE = -1
HELD_SCHEMA = pa.schema([("ngram", pa.int64()), ("part", pa.int64())])
"""An n-gram that the training text of a part holds."""
_TEXTS_IN_SOURCE = 1 << 32


References = Callable[[int], NGrams]
"""Maps a part's number to the n-grams of held-out and evaluation texts that occur in its training
text, with every text that has them. Others among them change no overlap."""


ReferenceTexts = Part | str
"""A part with held-out documents, or the URL of n-grams of evaluation texts (`save_ngrams`)."""


def send_references(
    run: JobRun, overlaps: PartOverlaps, sources: Sequence[ReferenceTexts]
) -> References:
    """Gather the n-grams on the driver, and write them for all tasks."""
    gather = partial(_save, overlaps=overlaps, folder=f"{run.scratch}/{uuid.uuid4().hex}")
    records = map_tasks(run.spark, "reading held-out texts", sources, gather, run.report)
    ngrams = join_ngrams(load_ngrams(record["url"]) for record in records)
    url = save_ngrams(run.scratch, ngrams)
    overlaps.remember(url)
    return partial(_sent, url=url)


def _save(source: ReferenceTexts, overlaps: PartOverlaps, folder: str) -> dict[str, Any]:
    return {"url": save_ngrams(folder, _read(source, overlaps))}


def _read(source: ReferenceTexts, overlaps: PartOverlaps) -> NGrams:
    if isinstance(source, str):
        return load_ngrams(source)
    return group_ngrams(overlaps.held_out_ngrams(source))


def _sent(_: int, url: str) -> NGrams:
    """All n-grams, in one file that a worker reads once."""
    return load_ngrams(url)


def join_references(
    run: JobRun,
    overlaps: PartOverlaps,
    sources: Sequence[ReferenceTexts],
    parts: Sequence[Part],
    text_bytes: int,
) -> References:
    """Join the n-grams with those of the parts, of so many bytes of text in all, by Spark."""
    work = Work(run.spark, text_bytes // BYTES_PER_WORD, run.scratch, run.report)
    references = work.over_parts(sources, partial(_list, overlaps=overlaps), REFERENCE_SCHEMA)
    held = work.over_parts(parts, partial(_list_held, overlaps=overlaps), HELD_SCHEMA)
    held_references = held.join(_without_set_phrases(work, references), "ngram")
    places = work.by_part(held_references, REFERENCE_SCHEMA, "finding held-out n-grams").places
    return partial(_joined, places=places)


def _list(number: int, source: ReferenceTexts, overlaps: PartOverlaps) -> pa.Table:
    ngrams = _read(source, overlaps)
    # Numbers of texts that are unique over all sources.
    texts = number * _TEXTS_IN_SOURCE + ngrams.texts
    columns = [ngrams.hashes.view(np.int64), texts, ngrams.sizes[ngrams.texts]]
    return pa.Table.from_arrays(list(map(pa.array, columns)), schema=REFERENCE_SCHEMA)


def _list_held(number: int, part: Part, overlaps: PartOverlaps) -> pa.Table:
    hashes = overlaps.training_ngrams(part).view(np.int64)
    columns = [pa.array(hashes), pa.array(np.full(len(hashes), number))]
    return pa.Table.from_arrays(columns, schema=HELD_SCHEMA)


def _without_set_phrases(work: Work, references: DataFrame) -> DataFrame:
    """The same rows, but a single one for an n-gram that is a set phrase (`COMMON_TEXTS`)."""
    place = F.row_number().over(Window.partitionBy("ngram").orderBy("text")).alias("place")
    # One text past the limit is enough to tell a set phrase.
    first = references.select("*", place).where(F.col("place") <= COMMON_TEXTS + 1)
    first = work.keep(first, "reading held-out texts")
    common = first.where(F.col("place") > COMMON_TEXTS)
    phrases = common.select("ngram", F.lit(SET_PHRASE).alias("text"), F.lit(1).alias("size"))
    return first.drop("place").join(phrases, "ngram", "left_anti").union(phrases)


def _joined(number: int, places: dict[int, RowLocation]) -> NGrams:
    """The n-grams that the part holds, from its rows of `REFERENCE_SCHEMA`."""
    rows = places[number].read() if number in places else REFERENCE_SCHEMA.empty_table()
    return _as_ngrams(*(np.asarray(rows[name]) for name in REFERENCE_SCHEMA.names))


def _as_ngrams(ngrams: np.ndarray, texts: np.ndarray, sizes: np.ndarray) -> NGrams:
    """Rows of `REFERENCE_SCHEMA` as n-grams; a set phrase is repeated so that it counts as one."""
    times = np.where(texts == SET_PHRASE, COMMON_TEXTS + 1, 1)
    hashes, texts, sizes = (
        np.repeat(column, times) for column in (ngrams.view(np.uint64), texts, sizes)
    )
    _, first, numbers = np.unique(texts, return_index=True, return_inverse=True)
    order = np.argsort(hashes, kind="stable")
    return NGrams(hashes[order], numbers[order], sizes[first])
