"""How much a text and texts that must not be trained on have in common, by runs of words.

The measure is the n-gram overlap of "Language Models are Few-Shot Learners" (Brown and others,
2020), appendix C, taken both ways: a document may be made of reference text for the most part, or
may hold nearly all of a shorter one. The hashes are those of `spark_jobs.minhash`.
"""

import io
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import fsspec
import numpy as np

from artifacts.arrays import run_starts
from spark_jobs.minhash import Shingles, WordSums, shingle, sum_words
from spark_jobs.text import fold

COMMON_TEXTS = 100
"""A run that stands in more reference texts than this is a set phrase: it tells of none of them."""


@dataclass(frozen=True)
class Runs:
    """The word runs of reference texts."""

    hashes: np.ndarray
    """uint64, sorted; a run that stands in several texts comes once for each."""
    texts: np.ndarray
    """int64: the text of each run, by number."""
    sizes: np.ndarray
    """int64: different runs in each text."""

    def overlap(self, shingles: Shingles) -> np.ndarray:
        """The larger of both shares, for each document."""
        held = self._hold(shingles.hashes)
        return np.maximum(_share(shingles, held), self._coverage(shingles, held))

    def _coverage(self, shingles: Shingles, held: np.ndarray) -> np.ndarray:
        """Of the runs of the reference text that a document holds most of, the share it holds."""
        hashes, documents = _each_once(shingles.hashes[held], _owners(shingles)[held])
        first = np.searchsorted(self.hashes, hashes, side="left")
        counts = np.searchsorted(self.hashes, hashes, side="right") - first
        counts[counts > COMMON_TEXTS] = 0
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        texts = self.texts[np.repeat(first, counts) + within]
        codes = np.repeat(documents, counts) * len(self.sizes) + texts
        codes, common = np.unique(codes, return_counts=True)
        covered = np.zeros(len(shingles.offsets) - 1)
        shares = common / self.sizes[codes % len(self.sizes)]
        np.maximum.at(covered, codes // len(self.sizes), shares)
        return covered

    def _hold(self, hashes: np.ndarray) -> np.ndarray:
        """Which hashes are among the runs."""
        # Nearly all are not: a table of their lowest bits, which fits the processor's cache, tells
        # that without a search.
        table, mask = self._lowest_bits
        found = table[hashes & mask]
        candidates = np.flatnonzero(found)
        # In order, neighbours are looked up in memory that was just read.
        candidates = candidates[np.argsort(hashes[candidates])]
        wanted = hashes[candidates]
        places = np.minimum(np.searchsorted(self.hashes, wanted), len(self.hashes) - 1)
        found[candidates] = self.hashes[places] == wanted
        return found

    @cached_property
    def _lowest_bits(self) -> tuple[np.ndarray, np.uint64]:
        bits = max(12, len(self.hashes).bit_length() + 3)
        mask = np.uint64((1 << bits) - 1)
        table = np.zeros(1 << bits, bool)
        table[self.hashes & mask] = True
        return table, mask


def word_runs(texts: list[str], words: int) -> Runs:
    """The hashes of all runs of so many words; shorter texts give none."""
    folded = [text for text in map(fold, texts) if text.count(" ") >= words - 1]
    shingles = shingle(sum_words(folded), words)
    hashes, owners = _each_once(shingles.hashes, _owners(shingles))
    return Runs(hashes, owners, np.bincount(owners, minlength=len(folded)))


def _share(shingles: Shingles, held: np.ndarray) -> np.ndarray:
    """Of each document's runs, the share that stands in any reference text."""
    return np.add.reduceat(held.astype(np.int64), shingles.offsets[:-1]) / np.diff(shingles.offsets)


def _owners(shingles: Shingles) -> np.ndarray:
    """The number of the text that each shingle belongs to."""
    return np.repeat(np.arange(len(shingles.offsets) - 1), np.diff(shingles.offsets))


def _each_once(hashes: np.ndarray, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The different pairs, ordered by hash."""
    order = np.lexsort((owners, hashes))
    hashes, owners = hashes[order], owners[order]
    new = run_starts(hashes) | run_starts(owners)
    return hashes[new], owners[new]


def join_runs(pieces: Iterable[Runs]) -> Runs:
    """The runs of several groups of texts as those of one."""
    pieces = list(pieces)
    firsts = np.cumsum([0, *(len(piece.sizes) for piece in pieces)])
    hashes = np.concatenate([piece.hashes for piece in pieces])
    texts = np.concatenate([p.texts + first for p, first in zip(pieces, firsts, strict=False)])
    order = np.argsort(hashes, kind="stable")
    return Runs(hashes[order], texts[order], np.concatenate([piece.sizes for piece in pieces]))


def overlaps(texts: WordSums, words: int, runs: Runs) -> np.ndarray:
    """How much each text has in common with the reference texts, from 0 to 1.

    The larger of two shares: of the text's runs that stand in reference texts, and of one reference
    text's runs that stand in it. Texts shorter than a run have 0.
    """
    if not len(runs.hashes) or not len(texts.sizes):
        return np.zeros(len(texts.sizes))
    shingles = shingle(texts, words)
    return np.where(texts.sizes >= words, runs.overlap(shingles), 0)


def save_runs(url: str, runs: Runs) -> None:
    """Keep runs where tasks find them."""
    content = io.BytesIO()
    np.savez(content, hashes=runs.hashes, texts=runs.texts, sizes=runs.sizes)
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
    filesystem.pipe_file(path, content.getvalue())


@lru_cache(maxsize=2)
def load_runs(url: str) -> Runs:
    """Runs that were kept; a worker reads them once."""
    with fsspec.open(url, "rb") as file, np.load(io.BytesIO(file.read())) as arrays:
        return Runs(arrays["hashes"], arrays["texts"], arrays["sizes"])
