"""Overlap of texts with text that must not be trained on, by n-grams of words.

The measure is the n-gram overlap of "Language Models are Few-Shot Learners" (Brown and others,
2020), appendix C, taken both ways: a document may be made of reference text for the most part, or
may hold nearly all of a shorter one. The hashes are those of `spark_jobs.text`.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np
import pyarrow as pa

from artifacts.errors import UserError
from artifacts.numbers import ends_of, mix, run_starts, sorted_unique, spans
from artifacts.storage import files
from spark_jobs.runtime.parquet import flat_bytes
from spark_jobs.settings import DecontaminationSettings
from spark_jobs.text import Shingles, WordSums, fold, shingle, sum_words

COMMON_TEXTS, COMMON_CLUSTERS = 100, 2
"""An n-gram in more reference texts, or in held-out texts of more clusters, than this is a set
phrase, which says nothing of any text. Of clusters, few are enough: where a twentieth of the text
is held out, what three share is in some sixty, such as a clause that all contracts have. It is
trained on with any of them, so that it is no reason to drop one."""
LEAST_NGRAMS = 8
"""A share is of at least so many n-grams, or of all that a text has: of one that consists of set
phrases but for an n-gram or two, these say nothing."""
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
    """int64: of how many different n-grams in each text shares are; set phrases count only up to
    `LEAST_NGRAMS`."""
    clusters: np.ndarray
    """uint64: the cluster of each held-out text, by a hash of its name; 0 for evaluation texts."""
    phrases: np.ndarray
    """uint64, sorted: set phrases, which count for nothing; the fields above are without them."""
    url: str | None = None
    """Where they were read from; its last part is a hash of the content. None if they were not read
    from a file."""

    @cached_property
    def lookup(self) -> Lookup:
        """Each n-gram once."""
        return Lookup(self.hashes[self._starts[:-1]])

    @cached_property
    def _phrase_lookup(self) -> Lookup:
        return Lookup(self.phrases)

    @cached_property
    def _starts(self) -> np.ndarray:
        """Where each different n-gram begins, and the end."""
        return np.append(np.flatnonzero(run_starts(self.hashes)), len(self.hashes))

    def text_keys(self) -> np.ndarray:
        """A hash of each text's n-grams and size: uint64, shape (texts,)."""
        keys = np.zeros(len(self.sizes), np.uint64)
        # A sum, which wraps around at 2**64, is the same in any order of the n-grams.
        np.add.at(keys, self.texts, mix(self.hashes))
        return keys + mix(self.sizes.astype(np.uint64))

    def without_phrases(self) -> "NGrams":
        """The same n-grams, but for set phrases."""
        counts = np.diff(self._starts)
        # Most are in few texts, whose clusters need not be counted.
        is_frequent = np.repeat(counts > COMMON_CLUSTERS, counts)
        hashes, clusters = self.hashes[is_frequent], self.clusters[self.texts[is_frequent]]
        hashes, _ = each_once(hashes[clusters > 0], clusters[clusters > 0])
        different = np.flatnonzero(run_starts(hashes))
        times = np.diff(np.append(different, len(hashes)))
        of_clusters = hashes[different[times > COMMON_CLUSTERS]]
        of_texts = self.lookup.ordered[counts > COMMON_TEXTS]
        phrases = sorted_unique(np.concatenate([self.phrases, of_clusters, of_texts]))
        is_phrase = Lookup(phrases).find(self.hashes)
        sizes = self.sizes - np.bincount(self.texts[is_phrase], minlength=len(self.sizes))
        sizes = np.maximum(sizes, np.minimum(self.sizes, LEAST_NGRAMS))
        rest = self.hashes[~is_phrase], self.texts[~is_phrase]
        return NGrams(*rest, sizes, self.clusters, phrases)

    def overlap(self, shingles: Shingles) -> np.ndarray:
        """The larger of the two shares (`overlaps`), for each document."""
        held = self.lookup.find(shingles.hashes)
        hashes, documents = shingles.hashes[held], _owners(shingles)[held]
        document, text, common = self._count(hashes, documents)
        covered = np.zeros(len(shingles.offsets) - 1)
        np.maximum.at(covered, document, common / self.sizes[text])
        own = ~self._phrase_lookup.find(shingles.hashes)
        # `overlaps` passes only documents with n-grams: `reduceat` takes no empty ones.
        counts, of = (
            np.add.reduceat(one.astype(np.int64), shingles.offsets[:-1]) for one in (held, own)
        )
        least = np.minimum(np.diff(shingles.offsets), LEAST_NGRAMS)
        return np.maximum(counts / np.maximum(of, least), covered)

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
            yield self._count(hashes[start:end], documents[start:end])

    def holders(self, shingles: Shingles, names: np.ndarray, most: int) -> np.ndarray:
        """N-grams and names of documents that hold them, so many of each: uint64, (2, pairs)."""
        held = self.lookup.find(shingles.hashes)
        pairs = np.stack(each_once(shingles.hashes[held], names[_owners(shingles)[held]]))
        is_among = np.ones(pairs.shape[1], bool)
        is_among[most:] = pairs[0, most:] != pairs[0, :-most]
        return pairs[:, is_among]

    def _count(
        self, hashes: np.ndarray, documents: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pairs of `common`, from n-grams of these."""
        hashes, documents = each_once(hashes, documents)
        place = self.lookup.place(hashes)
        first = self._starts[place]
        counts = self._starts[place + 1] - first
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
    """The n-grams of evaluation texts, without set phrases; shorter texts give none."""
    return group_ngrams(ngrams_of(sum_words(list(map(fold, texts))), size)).without_phrases()


def group_ngrams(ngrams: Shingles, clusters: Sequence[str] = ()) -> NGrams:
    """The n-grams of reference texts, from those of each text (`ngrams_of`).

    Args:
        clusters: the cluster of each text, if they are held-out texts; empty for evaluation texts.
    """
    hashes, owners = each_once(ngrams.hashes, _owners(ngrams))
    count = len(ngrams.offsets) - 1
    names = np.zeros(count, np.uint64)
    for place, cluster in enumerate(clusters):
        digest = hashlib.blake2b(cluster.encode(), digest_size=8).digest()
        # Never 0, and of 63 bits, as Spark has only signed numbers.
        if cluster:
            names[place] = int.from_bytes(digest, "little") >> 1 | 1
    none = np.empty(0, np.uint64)
    return NGrams(hashes, owners, np.bincount(owners, minlength=count), names, none)


def _owners(shingles: Shingles) -> np.ndarray:
    """The number of the text that each shingle belongs to."""
    return np.repeat(np.arange(len(shingles.offsets) - 1), np.diff(shingles.offsets))


def each_once(hashes: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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
    # Stable, so that the texts of one n-gram stay in the order of their numbers.
    order = np.argsort(hashes, kind="stable")
    sizes, clusters, phrases = (
        np.concatenate([getattr(group, name) for group in groups])
        for name in ("sizes", "clusters", "phrases")
    )
    return NGrams(hashes[order], texts[order], sizes, clusters, phrases).without_phrases()


def overlaps(ngrams: Shingles, references: NGrams) -> np.ndarray:
    """How much each text has in common with the reference texts, from 0 to 1.

    The larger of two shares: of the text's n-grams that stand in reference texts, and of one
    reference text's that stand in it. Set phrases count for neither. Texts without n-grams have 0.

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
    # numpy gives all entries of an archive one fixed time, so equal n-grams are equal bytes: caches
    # know them by a hash of these.
    names = ("hashes", "texts", "sizes", "clusters", "phrases")
    np.savez(content, **{name: getattr(ngrams, name) for name in names})
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
    content, offsets = flat_bytes(column)
    hashes = content.view(np.uint64)
    return Shingles(hashes, offsets // hashes.itemsize)


def save_evaluation_ngrams(
    urls: list[str], folder: str, settings: DecontaminationSettings
) -> str | None:
    """Write the n-grams of evaluation texts where tasks find them (`save_ngrams`).

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
