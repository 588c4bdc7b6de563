"""Overlap of documents with text that must not be trained on, by n-grams of words.

The measure is the n-gram overlap of "Language Models are Few-Shot Learners" (Brown and others,
2020), appendix C, taken both ways: a document may be made of reference text for the most part, or
may hold nearly all of a shorter one. The hashes are those of `spark_jobs.text`. What overlaps too
much is left out, and listed.
"""

import hashlib
import io
import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F

from artifacts.cache import cache_key, read_cached, write_cached
from artifacts.errors import UserError
from artifacts.numbers import ends_of, mix, run_starts, sorted_unique, spans
from artifacts.progress import Report
from artifacts.shards.format import in_split
from artifacts.storage import files
from spark_jobs.runtime import parquet
from spark_jobs.runtime.tasks import Work, map_tasks
from spark_jobs.settings import DecontaminationSettings
from spark_jobs.text import Shingles, WordSums, fold, shingle, sum_words

COMMON_TEXTS = 100
"""An n-gram in more reference texts than this is a set phrase, which says nothing of any text."""
PAIRS_AT_ONCE = 1 << 24
"""Pairs of a document's n-gram and a text that has it; they take about 0.5 GB."""


class Lookup:
    """A set of hashes, in which others are looked up."""

    def __init__(self, ordered: np.ndarray) -> None:
        self.ordered = ordered
        """uint64, in order."""

    def find(self, hashes: np.ndarray) -> np.ndarray:
        """Whether each of the hashes is in the set: shape (hashes,)."""
        if not len(self.ordered):
            return np.zeros(len(hashes), bool)
        # Nearly all are not, which a table of their lowest bits tells without a search: 0.13 s in
        # place of 2.9 s for 2 million hashes among 8 million, 10 s in place of 230 s for 1 GB.
        table, mask = self._lowest_bits
        # All places are in the table; `clip` only saves the check of each, a third of the time.
        is_among = np.take(table, (hashes & mask).view(np.int64), mode="clip")
        candidates = np.flatnonzero(is_among)
        # In order, neighbors are looked up in memory that was just read.
        candidates = candidates[np.argsort(hashes[candidates])]
        ordered = hashes[candidates]
        is_among[candidates] = self.ordered[self.place(ordered)] == ordered
        return is_among

    def place(self, hashes: np.ndarray) -> np.ndarray:
        """Where hashes of the set are in it; for other hashes, any place."""
        return np.minimum(np.searchsorted(self.ordered, hashes), len(self.ordered) - 1)

    @cached_property
    def _lowest_bits(self) -> tuple[np.ndarray, np.uint64]:
        # At least eight places for each hash, so that few others fall on one that is taken.
        bits = max(22, len(self.ordered).bit_length() + 3)
        mask = np.uint64((1 << bits) - 1)
        table = np.zeros(1 << bits, bool)
        table[self.ordered & mask] = True
        return table, mask


@dataclass(frozen=True)
class NGrams:
    """The word n-grams of reference texts."""

    hashes: np.ndarray
    """uint64, sorted; an n-gram that stands in several texts comes once for each."""
    texts: np.ndarray
    """int64: the text of each n-gram, by number."""
    sizes: np.ndarray
    """int64: different n-grams in each text."""
    url: str | None = None
    """Where they were read from; its last part is a hash of the content. None if they were not read
    from a file."""

    @cached_property
    def lookup(self) -> Lookup:
        """Each n-gram once."""
        return Lookup(self.hashes[self._starts[:-1]])

    @cached_property
    def _starts(self) -> np.ndarray:
        """Where each different n-gram begins, and the end."""
        return np.append(np.flatnonzero(run_starts(self.hashes)), len(self.hashes))

    def text_keys(self) -> np.ndarray:
        """A hash of each text's n-grams: uint64, shape (texts,)."""
        keys = np.zeros(len(self.sizes), np.uint64)
        np.add.at(keys, self.texts, mix(self.hashes))
        return keys

    def overlap(self, shingles: Shingles) -> np.ndarray:
        """The larger of the two shares (`overlaps`), for each document."""
        held = self.lookup.find(shingles.hashes)
        hashes, documents = shingles.hashes[held], _owners(shingles)[held]
        document, text, common = self._count(hashes, documents, COMMON_TEXTS)
        covered = np.zeros(len(shingles.offsets) - 1)
        np.maximum.at(covered, document, common / self.sizes[text])
        # `overlaps` passes only documents with n-grams: `reduceat` takes no empty ones.
        counts = np.add.reduceat(held.astype(np.int64), shingles.offsets[:-1])
        return np.maximum(counts / np.diff(shingles.offsets), covered)

    def common(self, shingles: Shingles) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Find pairs of a document and a text that share n-grams, and count the different ones.

        Set phrases count as well. Yields arrays of shape (pairs,), for some documents at a time, in
        their order.
        """
        held = self.lookup.find(shingles.hashes)
        hashes, documents = shingles.hashes[held], _owners(shingles)[held]
        place = self.lookup.place(hashes)
        # Bounded by the pairs and not by the documents: an n-gram may be in very many texts.
        pairs = ends_of(self._starts[place + 1] - self._starts[place])
        first = np.flatnonzero(run_starts(documents))
        batches = first[run_starts(pairs[first] // PAIRS_AT_ONCE)]
        for start, end in pairwise([*batches, len(documents)]):
            yield self._count(hashes[start:end], documents[start:end], len(self.sizes))

    def _count(
        self, hashes: np.ndarray, documents: np.ndarray, most_texts: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pairs of `common`, from n-grams of these; those in more texts count for none."""
        hashes, documents = _each_once(hashes, documents)
        place = self.lookup.place(hashes)
        first = self._starts[place]
        counts = self._starts[place + 1] - first
        counts[counts > most_texts] = 0
        texts = self.texts[spans(first, counts)]
        # A pair as one number, so that equal pairs can be counted.
        codes = np.repeat(documents, counts) * len(self.sizes) + texts
        codes, common = np.unique(codes, return_counts=True)
        return codes // len(self.sizes), codes % len(self.sizes), common


def ngrams_of(texts: WordSums, size: int) -> Shingles:
    """The hashes of all n-grams of texts; a text of fewer words has none."""
    shingles = shingle(texts, size)
    is_long = texts.sizes >= size
    counts = np.where(is_long, np.diff(shingles.offsets), 0)
    if is_long.all():
        return shingles
    hashes = shingles.hashes[np.repeat(is_long, np.diff(shingles.offsets))]
    return Shingles(hashes, ends_of(counts))


def text_ngrams(texts: list[str], size: int) -> NGrams:
    """The n-grams of reference texts; shorter texts give none."""
    return group_ngrams(ngrams_of(sum_words(list(map(fold, texts))), size))


def group_ngrams(ngrams: Shingles) -> NGrams:
    """The n-grams of reference texts, from those of each text (`ngrams_of`)."""
    hashes, owners = _each_once(ngrams.hashes, _owners(ngrams))
    return NGrams(hashes, owners, np.bincount(owners, minlength=len(ngrams.offsets) - 1))


def _owners(shingles: Shingles) -> np.ndarray:
    """The number of the text that each shingle belongs to."""
    return np.repeat(np.arange(len(shingles.offsets) - 1), np.diff(shingles.offsets))


def _each_once(hashes: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each pair once, ordered by hash."""
    order = np.lexsort((owners, hashes))
    hashes, owners = hashes[order], owners[order]
    new = run_starts(hashes) | run_starts(owners)
    return hashes[new], owners[new]


def join_ngrams(groups: Iterable[NGrams]) -> NGrams:
    """Join the n-grams of several groups of texts; the texts are numbered through."""
    groups = list(groups)
    firsts = np.cumsum([0, *(len(group.sizes) for group in groups)])
    hashes = np.concatenate([group.hashes for group in groups])
    # `firsts` has one number more, that behind the last group.
    texts = np.concatenate(
        [group.texts + first for group, first in zip(groups, firsts, strict=False)]
    )
    order = np.argsort(hashes, kind="stable")
    return NGrams(hashes[order], texts[order], np.concatenate([group.sizes for group in groups]))


def overlaps(ngrams: Shingles, references: NGrams) -> np.ndarray:
    """How much each text has in common with the reference texts, from 0 to 1.

    The larger of two shares: of the text's n-grams that stand in reference texts, and of one
    reference text's that stand in it. Texts without n-grams have 0.

    Args:
        ngrams: of `ngrams_of`.
    """
    shares = np.zeros(len(ngrams.offsets) - 1)
    has_some = np.diff(ngrams.offsets) > 0
    if len(references.hashes) and has_some.any():
        offsets = np.append(ngrams.offsets[:-1][has_some], ngrams.offsets[-1])
        shares[has_some] = references.overlap(Shingles(ngrams.hashes, offsets))
    return shares


def save_ngrams(folder: str, ngrams: NGrams) -> str:
    """Write n-grams where tasks find them, under a hash of their content; return the URL."""
    content = io.BytesIO()
    np.savez(content, hashes=ngrams.hashes, texts=ngrams.texts, sizes=ngrams.sizes)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    url = f"{folder}/ngrams-{digest[:32]}.npz"
    files.write(url, content.getvalue(), sync=False)
    return url


@lru_cache(maxsize=2)
def load_ngrams(url: str) -> NGrams:
    """Read n-grams that were written; each worker reads them once."""
    return NGrams(**np.load(io.BytesIO(files.read(url))), url=url)


def pack_ngrams(texts: list[str], size: int) -> pa.Array:
    """The hashes of each text's n-grams as one binary value."""
    ngrams = ngrams_of(sum_words(list(map(fold, texts))), size)
    offsets = pa.py_buffer((ngrams.offsets * ngrams.hashes.itemsize).astype(np.int32))
    content = pa.py_buffer(np.ascontiguousarray(ngrams.hashes))
    return pa.Array.from_buffers(pa.binary(), len(texts), [None, offsets, content])


def unpack_ngrams(packed: pa.ChunkedArray) -> Shingles:
    """What `pack_ngrams` packed."""
    column = packed.combine_chunks()
    column = pa.concat_arrays(column.chunks) if isinstance(column, pa.ChunkedArray) else column
    content, offsets = parquet.flat_bytes(column)
    hashes = content.view(np.uint64)
    return Shingles(hashes, offsets // hashes.itemsize)


def save_evaluation_ngrams(
    urls: list[str], folder: str, settings: DecontaminationSettings
) -> str | None:
    """Write the n-grams of evaluation texts where tasks find them (`overlap.save_ngrams`).

    Returns:
        Where they are, or None where there are no evaluation texts.

    Raises:
        UserError: a file is absent or not of the form that its ending says.
    """
    if not urls:
        return None
    texts = [text for url in urls for text in read_texts(url)]
    return save_ngrams(folder, text_ngrams(texts, settings.ngram_size))


def read_texts(url: str) -> list[str]:
    """The texts of a `.txt` file (one) or a `.jsonl` file (one a line, under `text`)."""
    try:
        content = files.read(url).decode()
        if not url.endswith(".jsonl"):
            return [content]
        return [json.loads(line)["text"] for line in content.split("\n") if line.strip()]
    except FileNotFoundError as error:
        raise UserError(f"The evaluation text {url} does not exist.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"The evaluation text {url} is not JSON lines with a `text` each, in UTF-8 ({error})."
        ) from error


DOCUMENTS_PER_LIST = 20_000_000
"""Documents of the corpus for each list; of the default corpus, 1.3% are left out."""

LISTED_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("cluster", pa.string()),
        ("bytes", pa.int64()),
        ("split", pa.string()),
        ("overlap", pa.float64()),
    ]
)
"""A document that is left out, and the share of it that is reference text."""


def write_list(number: int, removed: pa.Table, folder: str) -> dict[str, int]:
    """Write documents as `overlaps_held_out-NNNNN.parquet` beside the shards, by id.

    Returns:
        The split that they were of, to how many.
    """
    listed = removed.sort_by("id")
    parquet.write_table(f"{folder}/overlaps_held_out-{number:05d}.parquet", listed)
    return dict(Counter(listed["split"].to_pylist()))


def find_overlap(folder: str, identifier: str) -> float | None:
    """The share of a document that is reference text, where it was left out for that."""
    for url in parquet.list_files(folder, "overlaps_held_out*.parquet"):
        removed = parquet.read_table(url, ["id", "overlap"])
        row = pc.index(removed["id"], pa.scalar(identifier)).as_py()
        if row >= 0:
            return float(removed["overlap"][row].as_py())
    return None


# Overlap of a corpus's documents with reference texts, part by part and run by run.
# When a corpus grows, its reference texts stay the same but for a few. A document without an n-gram
# of those few overlaps as before, so only the others are compared again.
# N-grams of reference texts reach the training text in two ways, with the same overlaps. Up to a
# limit of held-out text, every task gets all of them, some 30 bytes for each word. Beyond it, Spark
# joins reference text and training text by n-gram: a task gets only those that its part holds, and
# no process holds all of them.
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

    @classmethod
    def of(cls, size: int, folder: str | None) -> "PartOverlaps":
        """Make it for n-grams of so many words."""
        ngrams_key, key = (
            cache_key(entry, __name__, ["numpy", "pyarrow"], ngram_size=size)
            for entry in ("n-grams", "overlaps")
        )
        return cls(size, folder, ngrams_key, key)

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
        """The overlap of each document (`overlap.overlaps`).

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
    return Lookup(sorted_unique(np.concatenate(hashes)))


BYTES_PER_WORD = 6
"""Of text, including the space; a text has nearly as many n-grams as words."""
REFERENCE_SCHEMA = pa.schema([("ngram", pa.int64()), ("text", pa.int64()), ("size", pa.int64())])
"""An n-gram of a reference text, and how many different ones the text has; `SET_PHRASE` in place of
the text of one that is in more texts than count."""
SET_PHRASE = -1
HELD_SCHEMA = pa.schema([("ngram", pa.int64()), ("part", pa.int64())])
"""An n-gram that the training text of a part holds."""
_TEXTS_IN_PART = 1 << 32


References = Callable[[int], NGrams]
"""Maps a part's number to the n-grams of held-out and evaluation texts that occur in its training
text, with every text that has them. Others among them change no overlap."""


@dataclass(frozen=True)
class OverlapSearch:
    """What is compared with what, and by which means."""

    spark: SparkSession
    parts: list[parquet.Part]
    """Parts of the clean corpus; `References` takes their numbers."""
    with_held_out: list[parquet.Part]
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
    """Get the n-grams of the reference texts, in the way that suits the bytes of text.

    Both ways give the same overlaps, so `most_bytes` is not part of the shards' identity.
    """
    if held_out_bytes <= most_bytes:
        return _send_references(comparison)
    return _join_references(comparison, text_bytes // BYTES_PER_WORD)


def _send_references(comparison: OverlapSearch) -> References:
    """Gather the n-grams on the driver, and write them for all tasks."""
    folder = comparison.scratch
    gather = partial(_write, overlaps=comparison.overlaps, folder=f"{folder}/{uuid.uuid4().hex}")
    spark, report = comparison.spark, comparison.report
    records = map_tasks(spark, "reading held-out texts", comparison.with_held_out, gather, report)
    urls = [record["url"] for record in records]
    urls += [comparison.evaluation] if comparison.evaluation else []
    url = save_ngrams(folder, join_ngrams(map(load_ngrams, urls)))
    comparison.overlaps.remember(url)
    return partial(_sent, url=url)


def _sent(_: int, url: str) -> NGrams:
    """All n-grams, in one file that a worker reads once."""
    return load_ngrams(url)


def _write(part: parquet.Part, overlaps: PartOverlaps, folder: str) -> dict[str, Any]:
    return {"url": save_ngrams(folder, group_ngrams(overlaps.held_out_ngrams(part)))}


def _join_references(comparison: OverlapSearch, rows: int) -> References:
    """Join over about so many n-grams."""
    work = Work(comparison.spark, rows, comparison.scratch, comparison.report)
    evaluation = [comparison.evaluation] if comparison.evaluation else []
    gather = partial(_gather, overlaps=comparison.overlaps)
    references = work.over_parts([*comparison.with_held_out, *evaluation], gather, REFERENCE_SCHEMA)
    list_held = partial(_list_held, overlaps=comparison.overlaps)
    held = work.over_parts(comparison.parts, list_held, HELD_SCHEMA)
    held_references = held.join(_without_set_phrases(work, references), "ngram")
    places = work.by_part(held_references, REFERENCE_SCHEMA, "finding held-out n-grams").places
    return partial(_joined, places=places)


def _joined(number: int, places: dict[int, parquet.RowLocation]) -> NGrams:
    """The n-grams that the part holds, from its rows of `REFERENCE_SCHEMA`."""
    rows = places[number].read() if number in places else REFERENCE_SCHEMA.empty_table()
    return _as_ngrams(*(np.asarray(rows[name]) for name in REFERENCE_SCHEMA.names))


def _without_set_phrases(work: Work, references: DataFrame) -> DataFrame:
    """The same rows, but a single one for an n-gram that is a set phrase (`COMMON_TEXTS`)."""
    place = F.row_number().over(Window.partitionBy("ngram").orderBy("text")).alias("place")
    # One text past the limit is enough to tell a set phrase.
    first = references.select("*", place).where(F.col("place") <= COMMON_TEXTS + 1)
    first = work.keep(first, "reading held-out texts")
    common = first.where(F.col("place") > COMMON_TEXTS)
    phrases = common.select("ngram", F.lit(SET_PHRASE).alias("text"), F.lit(1).alias("size"))
    return first.drop("place").join(phrases, "ngram", "left_anti").union(phrases)


def _gather(number: int, source: parquet.Part | str, overlaps: PartOverlaps) -> pa.Table:
    """The n-grams of a part's held-out texts, or of the evaluation texts at a URL."""
    if isinstance(source, parquet.Part):
        ngrams = group_ngrams(overlaps.held_out_ngrams(source))
    else:
        ngrams = load_ngrams(source)
    # Numbers of texts that are unique over all parts.
    texts = number * _TEXTS_IN_PART + ngrams.texts
    columns = [ngrams.hashes.view(np.int64), texts, ngrams.sizes[ngrams.texts]]
    return pa.Table.from_arrays(list(map(pa.array, columns)), schema=REFERENCE_SCHEMA)


def _list_held(number: int, part: parquet.Part, overlaps: PartOverlaps) -> pa.Table:
    hashes = overlaps.training_ngrams(part).view(np.int64)
    columns = [pa.array(hashes), pa.array(np.full(len(hashes), number))]
    return pa.Table.from_arrays(columns, schema=HELD_SCHEMA)


def _as_ngrams(ngrams: np.ndarray, texts: np.ndarray, sizes: np.ndarray) -> NGrams:
    """Rows of `REFERENCE_SCHEMA` as n-grams; a set phrase is repeated so that it counts as one."""
    times = np.where(texts == SET_PHRASE, COMMON_TEXTS + 1, 1)
    hashes, texts, sizes = (
        np.repeat(column, times) for column in (ngrams.view(np.uint64), texts, sizes)
    )
    _, first, numbers = np.unique(texts, return_index=True, return_inverse=True)
    order = np.argsort(hashes, kind="stable")
    return NGrams(hashes[order], numbers[order], sizes[first])
