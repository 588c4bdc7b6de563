"""Overlaps of a corpus's documents with reference texts, part by part and run by run.

When a corpus grows, its reference texts stay the same but for a few. A document without an n-gram
of those few overlaps as before, so only the others are compared again.
"""

import hashlib
import io
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from artifacts.cache import cache_key, read_cached, write_cached
from artifacts.numbers import ends_of, sorted_unique
from artifacts.shards.format import in_split
from artifacts.storage import files
from spark_jobs.decontaminate.ngrams import (
    COMMON_CLUSTERS,
    COMMON_TEXTS,
    LEAST_NGRAMS,
    Lookup,
    NGrams,
    group_ngrams,
    join_ngrams,
    load_ngrams,
    overlaps,
    pack_ngrams,
    save_ngrams,
    unpack_ngrams,
)
from spark_jobs.runtime import parquet
from spark_jobs.runtime.parquet import Part, RowLocation
from spark_jobs.runtime.tasks import JobRun, Work, map_tasks
from spark_jobs.text import Shingles


def entry_key(key: str, name: str) -> str:
    """The cache key of a result for one part (`Part.content_name`), from the result's own key."""
    return f"{key}-{hashlib.blake2b(name.encode(), digest_size=16).hexdigest()}"


_COMPARED_WITH = b"references"
"""Metadata key of an entry: the name of the n-grams that its documents were compared with."""


@dataclass(frozen=True)
class PartOverlaps:
    """Compares documents with reference texts, part by part.

    N-grams and overlaps are cached by document: for 1 GB of text that spares 20 s of one core.
    """

    size: int
    """Words in an n-gram."""
    folder: str | None
    """Of the cache."""
    ngrams_key: str
    key: str
    """Keys of `artifacts.cache.cache_key` for n-grams and for overlaps, but for the part."""
    evaluation_sources: Sequence[str] = ()
    """Sources of held-out text that makes no boilerplate: exams quote what they ask about."""

    @classmethod
    def of(
        cls, size: int, folder: str | None, evaluation_sources: Sequence[str] = ()
    ) -> "PartOverlaps":
        """Make it for n-grams of so many words."""
        ngrams_key, key = (
            cache_key(entry, __name__, ["numpy", "pyarrow"], ngram_size=size)
            for entry in ("n-grams", "overlaps")
        )
        return cls(size, folder, ngrams_key, key, evaluation_sources)

    def ngrams(
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

        packed = parquet.cached_rows(self.folder, entry_key(self.ngrams_key, name), ids, make)
        return unpack_ngrams(packed["ngrams"])

    def held_out_ngrams(self, part: parquet.Part) -> Shingles:
        """The n-grams of the part's held-out documents."""
        documents = part.read(["id", "split"])
        places = pa.array(np.flatnonzero(in_split(documents, "held_out")))
        # An entry of their own, since they are needed before all others, and are few.
        name = f"held_out {part.content_name()}"
        ids = documents["id"].take(places)
        return self.ngrams(name, ids, lambda: part.read(["text"])["text"].take(places))

    def training_ngrams(self, part: parquet.Part) -> np.ndarray:
        """The different n-grams of the part's other documents, sorted: shape (n-grams,)."""
        documents = part.read(["id", "split"])
        ngrams = self.ngrams(
            part.content_name(), documents["id"], lambda: part.read(["text"])["text"]
        )
        is_training = ~in_split(documents, "held_out")
        return sorted_unique(ngrams.hashes[np.repeat(is_training, np.diff(ngrams.offsets))])

    def remember(self, url: str) -> None:
        """Keep the n-grams at a URL, for later runs to tell which reference texts are new."""
        entry = f"{self.key}-{url.rpartition('/')[2]}"
        if self.folder and read_cached(self.folder, entry) is None:
            write_cached(self.folder, entry, files.read(url))

    def of_documents(
        self,
        name: str,
        ids: pa.ChunkedArray,
        texts: Callable[[], pa.ChunkedArray],
        references: NGrams,
    ) -> np.ndarray:
        """The overlap of each document (`ngrams.overlaps`).

        Args:
            name: of `Part.content_name`.
            texts: reads the documents' texts, where they are needed.
            references: overlaps with those that were read from a file are cached; with others, they
                are computed in every run.
        """
        if self.folder is None or references.url is None:
            return overlaps(self.ngrams(name, ids, texts), references)
        key, compared_with = entry_key(self.key, name), references.url.rpartition("/")[2]
        changed = None
        if (entry := read_cached(self.folder, key)) is not None:
            earlier_overlaps = pa.ipc.open_stream(entry).read_all()
            places = pc.index_in(ids, earlier_overlaps["id"])
            earlier = earlier_overlaps.schema.metadata[_COMPARED_WITH].decode()
            if earlier == compared_with and not places.null_count:
                return np.asarray(earlier_overlaps["overlap"].take(places))
            changed = _changed_ngrams(self.folder, f"{self.key}-{earlier}", references.url)
        ngrams = self.ngrams(name, ids, texts)
        if changed is None:
            shares = overlaps(ngrams, references)
        else:
            shares = earlier_overlaps["overlap"].take(places).fill_null(0).to_numpy().copy()
            # Other documents have no n-gram of a text that came or left, and overlap as before.
            touched = np.diff(ends_of(changed.find(ngrams.hashes))[ngrams.offsets]) > 0
            is_changed = touched | np.asarray(places.is_null())
            shares[is_changed] = overlaps(ngrams.select(is_changed), references)
        table = pa.table({"id": ids, "overlap": shares})
        table = table.replace_schema_metadata({_COMPARED_WITH: compared_with})
        write_cached(self.folder, key, parquet.to_stream(table))
        return shares


@lru_cache(maxsize=2)
def _changed_ngrams(folder: str, earlier: str, references: str) -> Lookup | None:
    """The n-grams of texts that came or left since; None where the earlier ones are not known."""
    content = read_cached(folder, earlier)
    if content is None:
        return None
    references_of_both = [NGrams(**np.load(io.BytesIO(content))), load_ngrams(references)]
    keys = [ngrams.text_keys() for ngrams in references_of_both]
    different, counts = np.unique(np.concatenate(keys), return_counts=True)
    # A text that both have once is no change; one that comes repeatedly is looked at again.
    same = different[counts == 2]
    same = same[np.isin(same, keys[0]) & np.isin(same, keys[1])]
    hashes = [
        ngrams.hashes[~np.isin(of_texts, same)[ngrams.texts]]
        for ngrams, of_texts in zip(references_of_both, keys, strict=True)
    ]
    earlier_phrases, phrases = (ngrams.phrases for ngrams in references_of_both)
    hashes.append(np.setxor1d(earlier_phrases, phrases))
    return Lookup(sorted_unique(np.concatenate(hashes)))


BYTES_PER_WORD = 6
"""Of text, including the space; a text has nearly as many n-grams as words."""
REFERENCE_SCHEMA = pa.schema(
    [(name, pa.int64()) for name in ("ngram", "text", "size", "of_cluster")]
)
"""An n-gram of a reference text, how many different ones the text has, and the text's cluster;
`SET_PHRASE` in place of the text of a set phrase."""
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
    # All of them for every part: they lie in one file, which a worker reads only once.
    return lambda part: load_ngrams(url)


def _save(source: ReferenceTexts, overlaps: PartOverlaps, folder: str) -> dict[str, Any]:
    # Those of evaluation texts are in a file of their own already.
    is_saved = isinstance(source, str)
    return {"url": source if is_saved else save_ngrams(folder, _read(source, overlaps))}


def _read(source: ReferenceTexts, overlaps: PartOverlaps) -> NGrams:
    if isinstance(source, str):
        return load_ngrams(source)
    documents = source.read(["cluster", "split", "source"])
    is_evaluation = pc.is_in(
        documents["source"], pa.array(overlaps.evaluation_sources, pa.string())
    )
    clusters = pc.if_else(is_evaluation, "", documents["cluster"])
    clusters = clusters.filter(pa.array(in_split(documents, "held_out")))
    return group_ngrams(overlaps.held_out_ngrams(source), clusters.to_pylist())


def join_references(
    run: JobRun,
    overlaps: PartOverlaps,
    sources: Sequence[ReferenceTexts],
    parts: Sequence[Part],
    text_bytes: int,
) -> References:
    """Join the n-grams with those of the parts, of so many bytes of text in all, by Spark."""
    work = Work(run.spark, text_bytes // BYTES_PER_WORD, run.scratch, run.report)
    list_ = partial(_list, overlaps=overlaps)
    references = work.keep_parts(sources, list_, REFERENCE_SCHEMA, "reading held-out texts")
    held = work.over_parts(parts, partial(_list_held, overlaps=overlaps), HELD_SCHEMA)
    held_references = held.join(_without_set_phrases(work, references), "ngram")
    places = work.by_part(held_references, REFERENCE_SCHEMA, "finding held-out n-grams").places
    return partial(_joined, places=places)


def _list(number: int, source: ReferenceTexts, overlaps: PartOverlaps) -> pa.Table:
    ngrams = _read(source, overlaps)
    # Numbers of texts that are unique over all sources.
    texts = number * _TEXTS_IN_SOURCE + ngrams.texts
    sizes, clusters = ngrams.sizes[ngrams.texts], ngrams.clusters[ngrams.texts].view(np.int64)
    phrases = [ngrams.phrases.view(np.int64), *np.zeros((3, len(ngrams.phrases)), np.int64)]
    phrases[1] += SET_PHRASE
    of_texts = [ngrams.hashes.view(np.int64), texts, sizes, clusters]
    columns = [pa.array(np.append(*both)) for both in zip(of_texts, phrases, strict=True)]
    return pa.Table.from_arrays(columns, schema=REFERENCE_SCHEMA)


def _list_held(number: int, part: Part, overlaps: PartOverlaps) -> pa.Table:
    hashes = overlaps.training_ngrams(part).view(np.int64)
    columns = [pa.array(hashes), pa.array(np.full(len(hashes), number))]
    return pa.Table.from_arrays(columns, schema=HELD_SCHEMA)


def _without_set_phrases(work: Work, references: DataFrame) -> DataFrame:
    """The rows of `NGrams.without_phrases`, and one of each set phrase."""
    of_ngram = Window.partitionBy("ngram")
    texts = F.row_number().over(of_ngram.orderBy("text")).alias("texts")
    # Texts without a cluster have 0, and come last.
    clusters = F.dense_rank().over(of_ngram.orderBy(F.desc("of_cluster"))).alias("clusters")
    counted = references.select("*", texts, clusters)
    is_phrase = (F.col("text") == SET_PHRASE) | (F.col("texts") > COMMON_TEXTS)
    is_phrase |= (F.col("clusters") > COMMON_CLUSTERS) & (F.col("of_cluster") > 0)
    phrases = counted.where(is_phrase).select("ngram", F.lit(True).alias("is_phrase")).distinct()
    phrases = work.keep(phrases, "finding set phrases")
    joined = references.join(phrases, "ngram", "left")
    size = F.col("size") - F.count("is_phrase").over(Window.partitionBy("text"))
    size = F.greatest(size, F.least("size", F.lit(LEAST_NGRAMS).cast("long")))
    rest = joined.withColumn("size", size).where("is_phrase is null")
    marked = phrases.select("ngram", *(F.lit(n).cast("long") for n in (SET_PHRASE, 0, 0)))
    return rest.select(*REFERENCE_SCHEMA.names).union(marked)


def _joined(number: int, places: dict[int, RowLocation]) -> NGrams:
    """The n-grams that the part holds, from its rows of `REFERENCE_SCHEMA`."""
    rows = places[number].read() if number in places else REFERENCE_SCHEMA.empty_table()
    columns = [np.asarray(rows[name]) for name in REFERENCE_SCHEMA.names]
    is_text = columns[1] != SET_PHRASE
    phrases = np.sort(columns[0][~is_text].view(np.uint64))
    ngrams, texts, sizes, clusters = (column[is_text] for column in columns)
    _, first, numbers = np.unique(texts, return_index=True, return_inverse=True)
    hashes = ngrams.view(np.uint64)
    order = np.argsort(hashes, kind="stable")
    of_texts = sizes[first], clusters[first].astype(np.uint64)
    return NGrams(hashes[order], numbers[order], *of_texts, phrases)
