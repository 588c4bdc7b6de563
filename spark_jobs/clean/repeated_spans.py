"""Which windows of words stand in several places, and which of the places is the first.

A window is identified by a 128-bit digest of its folded words, as an exact copy is by that of its
text. Fingerprints are those of winnowing (Schleimer, Wilkerson and Aiken, "Winnowing: Local
Algorithms for Document Fingerprinting", 2003): of all hashes of shorter runs within a window, the
smallest. Equal windows have an equal fingerprint, and there is one in some thirteen words (at 50
words a window), so that few rows are shuffled.

Two joins: fingerprints that occur repeatedly tell which windows are looked at whole; the digests of
these tell which are equal. Both are over small columns, and nothing of any document is on the
driver. The result follows from the documents alone, whatever parts they lie in.
"""

import hashlib
import re
from collections.abc import Collection, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from artifacts.numbers import run_starts
from spark_jobs.clean.prepare import EXAMPLE_COLUMN, PreparedPart
from spark_jobs.decontaminate.overlap import ngrams_of
from spark_jobs.runtime.parquet import PartRows, RowLocation
from spark_jobs.runtime.tasks import Work
from spark_jobs.text import HASH_BYTES, fold, sum_words

_WORD = re.compile(r"\S+\s*")


def fold_words(text: str) -> str:
    """A text as `fold` leaves it, but with just the words of `word_spans`, in their order."""
    if text.isascii():
        return fold(text)
    # A character may fold to several, a space among them.
    return " ".join(fold(word).replace(" ", "") or word for word in text.split())


def word_spans(text: str) -> np.ndarray:
    """Shape (words, 2): where each word begins, and where the space after it ends, in characters.

    Args:
        text: without space before its first word.
    """
    spans = [match.span() for match in _WORD.finditer(text)]
    return np.array(spans, np.int64).reshape(-1, 2)


def fingerprints(folded: list[str], window: int) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of which each window of a text has at least one, and equal windows the same.

    Args:
        folded: texts as `fold_words` leaves them.
        window: words in a window.

    Returns:
        `(hashes, texts)`, int64 of shape (fingerprints,): a hash, and the number of its text.
    """
    long = [number for number, text in enumerate(folded) if text.count(" ") + 1 >= window]
    run, width = _run_words(window), _runs(window)
    ngrams = ngrams_of(sum_words([folded[number] for number in long]), run)
    hashes = ngrams.hashes.view(np.int64)
    # Windows that reach over the end of a text choose some hashes too many, and none too few.
    smallest = ~_sliding_maximum(~hashes, width)
    edge = np.full(width - 1, np.iinfo(np.int64).min)
    reached = _sliding_maximum(np.concatenate([edge, smallest, edge]), width)
    chosen = np.flatnonzero(reached == hashes) if len(smallest) else np.empty(0, np.int64)
    owners = np.searchsorted(ngrams.offsets, chosen, side="right") - 1
    return hashes[chosen], np.array(long, np.int64)[owners]


def windows_with(folded: str, window: int, hashes: Collection[int]) -> list[tuple[int, bytes]]:
    """The windows of a text that have one of these fingerprints: `(first word, digest)`.

    Args:
        folded: a text of at least `window` words, as `fold_words` leaves it.
    """
    ngrams = ngrams_of(sum_words([folded]), _run_words(window)).hashes.view(np.int64)
    found = np.isin(ngrams, np.fromiter(hashes, np.int64))
    firsts = np.flatnonzero(_sliding_maximum(found, _runs(window)))
    content = folded.encode("utf-8", "surrogatepass")
    spaces = np.flatnonzero(np.frombuffer(content, np.uint8) == ord(" "))
    starts, ends = np.append(0, spaces + 1), np.append(spaces, len(content))
    return [
        (first, _digest(content[starts[first] : ends[first + window - 1]]))
        for first in firsts.tolist()
    ]


def _run_words(window: int) -> int:
    """Words in a hashed run: few runs of half a window occur twice by chance."""
    return window // 2


def _runs(window: int) -> int:
    """Hashed runs in a window."""
    return window - _run_words(window) + 1


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=HASH_BYTES).digest()


def _sliding_maximum(values: np.ndarray, width: int) -> np.ndarray:
    """Shape (n - width + 1,): the largest of each `width` neighbors; none where n is smaller."""
    reached = 1
    while reached < width and len(values):
        step = min(reached, width - reached)
        values = np.maximum(values[:-step], values[step:])
        reached += step
    return values


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
    stay: RowLocation

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


def _read_windows(_: int, item: tuple[int, StayingPart, RowLocation], window: int) -> pa.Table:
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
