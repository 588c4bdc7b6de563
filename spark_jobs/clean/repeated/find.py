"""Which windows of words stand in several places, and which of the places is the first.

Two joins: fingerprints that occur repeatedly tell which windows are looked at whole; the digests of
these tell which are equal. Both are over small columns, and nothing of any document is on the
driver. The result follows from the documents alone, whatever parts they lie in.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from artifacts.numbers.arrays import run_starts
from spark_jobs.clean.prepare import EXAMPLE_COLUMN, PreparedPart
from spark_jobs.clean.repeated.windows import fingerprints, fold_words, windows_with
from spark_jobs.runtime.part_rows import PartRows, Place
from spark_jobs.runtime.work import Work

_NUMBER, _STRING = pa.int64(), pa.string()
_FOUND_SCHEMA = pa.schema([("row", _NUMBER), ("hash", _NUMBER)])
_FINGERPRINT_SCHEMA = pa.schema([("part", _NUMBER), *_FOUND_SCHEMA])
_WINDOW_SCHEMA = pa.schema(
    [
        ("part", _NUMBER),
        ("row", _NUMBER),
        ("digest", pa.binary()),
        ("changes", pa.bool_()),
        ("slice", _NUMBER),
        ("id", _STRING),
        ("word", _NUMBER),
    ]
)
REPEAT_SCHEMA = pa.schema(
    [("row", _NUMBER), ("word", _NUMBER), ("neighbor", _STRING), ("neighbor_word", _NUMBER)]
)
"""A window that stands in an earlier place too: its document's row and its first word, and the same
of the first place, by its document's id."""


class StayingPart(NamedTuple):
    """A prepared part, and which of its documents stay (`decider.DECIDED_SCHEMA`)."""

    prepared: PreparedPart
    stay: Place

    def read(self, columns: list[str]) -> pa.Table:
        """The documents that stay: what was decided of them, and columns of theirs."""
        stay = pa.Table.from_batches([self.stay.read()])
        found = self.prepared.read(columns).take(stay["row"])
        for name in columns:
            stay = stay.append_column(name, found[name])
        return stay


def may_change(documents: pa.Table) -> np.ndarray:
    """Shape (documents,): whether a document may lose text.

    What models are measured on stays whole, and so do examples, whose texts belong together.

    Args:
        documents: `split` and `example`.
    """
    return np.array(
        [
            split in ("train", "replay") and example is None
            for split, example in zip(
                documents["split"].to_pylist(), documents[EXAMPLE_COLUMN].to_pylist(), strict=True
            )
        ],
        bool,
    )


def find_repeats(work: Work, parts: dict[int, StayingPart], window: int) -> PartRows:
    """The windows that stand in an earlier place too: rows of `REPEAT_SCHEMA`, by part.

    First come the documents that may not change, then those that came first in the lineage, then
    those of smaller id. Only windows of documents that may change are listed.
    """
    read = partial(_read_fingerprints, window=window)
    every = work.keep_parts(sorted(parts.items()), read, _FINGERPRINT_SCHEMA, "fingerprinting")
    several = every.groupBy("hash").count().where("count > 1").select("hash")
    found = every.join(several, "hash", "left_semi").distinct()
    chosen = work.by_part(found, _FOUND_SCHEMA, "comparing fingerprints")
    items = [(number, parts[number], place) for number, place in sorted(chosen.places.items())]
    read_windows = partial(_read_windows, window=window)
    windows = work.keep_parts(items, read_windows, _WINDOW_SCHEMA, "reading windows")
    return work.by_part(_repeats(windows), REPEAT_SCHEMA, "comparing windows")


def _repeats(windows: DataFrame) -> DataFrame:
    place = F.struct("changes", "slice", "id", "word")
    firsts = windows.groupBy("digest").agg(F.min(place).alias("first"), F.count("*").alias("n"))
    later = windows.where("changes").join(firsts.where("n > 1"), "digest")
    return later.where(place != F.col("first")).select(
        *("part", "row", "word"),
        F.col("first.id").alias("neighbor"),
        F.col("first.word").alias("neighbor_word"),
    )


def _read_fingerprints(_: int, item: tuple[int, StayingPart], window: int) -> pa.Table:
    number, part = item
    documents = part.read(["text"])
    folded = list(map(fold_words, documents["text"].to_pylist()))
    hashes, texts = fingerprints(folded, window)
    rows = documents["row"].to_numpy()[texts]
    columns = [pa.array(np.full(len(rows), number)), pa.array(rows), pa.array(hashes)]
    return pa.Table.from_arrays(columns, schema=_FINGERPRINT_SCHEMA)


def _read_windows(_: int, item: tuple[int, StayingPart, Place], window: int) -> pa.Table:
    number, part, place = item
    found = dict(by_row(place.read()))
    documents = part.read(["id", "text", EXAMPLE_COLUMN])
    documents = documents.filter(pa.array(np.isin(documents["row"], list(found))))
    changes = may_change(documents).tolist()
    tables = [_WINDOW_SCHEMA.empty_table()]
    for document, is_changeable in zip(documents.to_pylist(), changes, strict=True):
        hashes = found[document["row"]]["hash"].to_pylist()
        windows = windows_with(fold_words(document["text"]), window, hashes)
        count = len(windows)
        columns = {
            "part": [number] * count,
            "row": [document["row"]] * count,
            "digest": [digest for _, digest in windows],
            "changes": [is_changeable] * count,
            "slice": [document["slice"]] * count,
            "id": [document["id"]] * count,
            "word": [first for first, _ in windows],
        }
        tables.append(pa.table(columns, _WINDOW_SCHEMA))
    return pa.concat_tables(tables)


def by_row(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each document, which lie together."""
    rows = batch["row"].to_numpy()
    starts = np.flatnonzero(run_starts(rows)).tolist()
    for first, last in zip(starts, [*starts[1:], len(rows)], strict=True):
        yield int(rows[first]), batch.slice(first, last - first)
