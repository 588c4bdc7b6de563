"""How much the documents of a corpus overlap with reference texts, part by part and run by run.

The reference texts of a corpus that grew are those of before, but for a few. The overlap of a
document that holds no n-gram of those few is what it was: only the others are compared again.

N-grams of reference texts reach the training text in two ways, with the same overlaps. Up to so
much held-out text every task is sent all of them, some 30 bytes for each of their words. Past it
Spark joins reference texts and training text by their n-grams: so a task gets those alone that its
part holds, and nobody holds all of them.
"""

import hashlib
import io
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from artifacts.cache import cache_key, read_cached, write_cached
from artifacts.numbers import ends_of, sorted_unique
from artifacts.progress import Report
from artifacts.shards.format import in_split
from artifacts.storage import files
from spark_jobs.decontaminate.overlap import (
    COMMON_TEXTS,
    Lookup,
    NGrams,
    group_ngrams,
    join_ngrams,
    load_ngrams,
    overlaps,
    pack_ngrams,
    read_ngrams,
    save_ngrams,
    unpack_ngrams,
)
from spark_jobs.runtime.parquet import Part, PartRows, cached_rows, to_stream
from spark_jobs.runtime.tasks import Work, map_tasks
from spark_jobs.text import Shingles


def entry_key(key: str, name: str) -> str:
    """The cache's key of what was made of a part (`Part.content_name`), from that of its making."""
    return f"{key}-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


@dataclass(frozen=True)
class PartNGrams:
    """Reads n-grams, cached by document: for 1 GB of text that spares 20 s of one core."""

    size: int
    """Words in an n-gram."""
    folder: str | None
    """Of the cache."""
    key: str
    """Key of `artifacts.cache.cache_key`, but for the part."""

    @classmethod
    def of(cls, size: int, folder: str | None) -> "PartNGrams":
        """N-grams of so many words."""
        key = cache_key("n-grams", __name__, ["numpy", "pyarrow"], ngram_size=size)
        return cls(size, folder, key)

    def of_documents(
        self, name: str, ids: pa.ChunkedArray, texts: Callable[[], pa.ChunkedArray]
    ) -> Shingles:
        """The n-grams of documents.

        Args:
            name: of `Part.content_name`.
            texts: reads the documents' texts, where they are needed.
        """

        def make(places: np.ndarray) -> pa.Table:
            chosen = texts().take(pa.array(places)).to_pylist()
            return pa.table({"ngrams": pack_ngrams(chosen, self.size)})

        found = cached_rows(self.folder, entry_key(self.key, name), ids, make)
        return unpack_ngrams(found["ngrams"])

    def of_held_out(self, part: Part) -> Shingles:
        """The n-grams of the part's held-out documents."""
        documents = part.read(["id", "split"])
        places = pa.array(np.flatnonzero(in_split(documents, "held_out")))
        # An entry of their own, since they are needed before all others, and are few.
        name = f"held_out {part.content_name()}"
        ids = documents["id"].take(places)
        return self.of_documents(name, ids, lambda: part.read(["text"])["text"].take(places))

    def of_training(self, part: Part) -> np.ndarray:
        """The different n-grams of the part's other documents, sorted: shape (n-grams,)."""
        documents = part.read(["id", "split"])
        found = self.of_documents(
            part.content_name(), documents["id"], lambda: part.read(["text"])["text"]
        )
        is_training = ~in_split(documents, "held_out")
        return sorted_unique(found.hashes[np.repeat(is_training, np.diff(found.offsets))])


_COMPARED_WITH = b"references"
"""Of an entry: the name of the n-grams that its documents were compared with."""


@dataclass(frozen=True)
class PartOverlaps:
    """Compares documents with reference texts, part by part."""

    ngrams: PartNGrams
    key: str
    """Key of `artifacts.cache.cache_key`, but for the part."""

    @classmethod
    def of(cls, size: int, folder: str | None) -> "PartOverlaps":
        """By n-grams of so many words."""
        key = cache_key("overlaps", __name__, ["numpy", "pyarrow"], ngram_size=size)
        return cls(PartNGrams.of(size, folder), key)

    def remember(self, url: str) -> None:
        """Keep the n-grams at a URL, for later runs to tell which reference texts are new."""
        folder, entry = self.ngrams.folder, f"{self.key}-{url.rpartition('/')[2]}"
        if folder and read_cached(folder, entry) is None:
            write_cached(folder, entry, files.read(url))

    def of_documents(
        self,
        name: str,
        ids: pa.ChunkedArray,
        texts: Callable[[], pa.ChunkedArray],
        references: NGrams,
    ) -> np.ndarray:
        """The overlap of each document (`overlap.overlaps`).

        Args:
            name: of `Part.content_name`.
            texts: reads the documents' texts, where they are needed.
            references: those that were read from a file are compared with once; others, in every
                run.
        """
        ngrams = cache(lambda: self.ngrams.of_documents(name, ids, texts))
        folder = self.ngrams.folder
        if folder is None or references.name is None:
            return overlaps(ngrams(), references)
        key = entry_key(self.key, name)
        entry = read_cached(folder, key)
        if entry is None:
            found = overlaps(ngrams(), references)
        else:
            kept = pa.ipc.open_stream(entry).read_all()
            places = pc.index_in(ids, kept["id"])
            if _compared_with(kept) == references.name and not places.null_count:
                return np.asarray(kept["overlap"].take(places))
            found = self._compare(kept, places, ngrams(), references)
        table = pa.table({"id": ids, "overlap": found})
        table = table.replace_schema_metadata({_COMPARED_WITH: references.name})
        write_cached(folder, key, to_stream(table))
        return found

    def _compare(
        self, kept: pa.Table, places: pa.ChunkedArray, ngrams: Shingles, references: NGrams
    ) -> np.ndarray:
        """The overlaps, given what was kept of those documents that have a place."""
        assert self.ngrams.folder and references.url
        earlier = f"{self.key}-{_compared_with(kept)}"
        changed = _changed_ngrams(self.ngrams.folder, earlier, references.url)
        if changed is None:
            return overlaps(ngrams, references)
        found = kept["overlap"].take(places).fill_null(0).to_numpy().copy()
        touched = np.diff(ends_of(changed.find(ngrams.hashes))[ngrams.offsets]) > 0
        again = touched | np.asarray(places.is_null())
        found[again] = overlaps(ngrams.select(again), references)
        return found


def _compared_with(kept: pa.Table) -> str:
    name: bytes = kept.schema.metadata[_COMPARED_WITH]
    return name.decode()


@lru_cache(maxsize=2)
def _changed_ngrams(folder: str, earlier: str, references: str) -> Lookup | None:
    """The n-grams of texts that came or left since; None where the earlier ones are not known."""
    content = read_cached(folder, earlier)
    if content is None:
        return None
    both = [read_ngrams(io.BytesIO(content)), load_ngrams(references)]
    keys = [one.text_keys() for one in both]
    different, counts = np.unique(np.concatenate(keys), return_counts=True)
    # A text that both have once is no change; one that comes repeatedly is looked at again.
    same = different[counts == 2]
    same = same[np.isin(same, keys[0]) & np.isin(same, keys[1])]
    hashes = [
        one.hashes[~np.isin(of_texts, same)[one.texts]]
        for one, of_texts in zip(both, keys, strict=True)
    ]
    return Lookup(sorted_unique(np.concatenate(hashes)))


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
class OverlapSearch:
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
    comparison: OverlapSearch, text_bytes: int, held_out_bytes: int, most_bytes: int
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


def _send_references(comparison: OverlapSearch) -> References:
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


def _join_references(comparison: OverlapSearch, rows: int) -> References:
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
