"""How alike two texts are: by their shingle sets, and before that by their signatures."""

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from artifacts.numbers.arrays import sorted_unique
from spark_jobs.text.normalize import fold
from spark_jobs.text.shingles import shingle, sum_words

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

PAIRS_AT_ONCE = 20_000
SIGNATURE_DEVIATIONS = 5
"""A pair is not looked at further if its signatures estimate the similarity this many standard
deviations below the threshold: fewer than one true pair in a million is lost by it."""


def plausible(left: np.ndarray, right: np.ndarray, threshold: float) -> np.ndarray:
    """Shape (m,): whether two signatures each leave it open that the threshold is reached.

    Args:
        left, right: shape (m, permutations), the lowest byte of each hash (`clean.prepare`).
    """
    width = left.shape[1]
    deviation = np.sqrt(threshold * (1 - threshold) / width)
    least = (threshold - SIGNATURE_DEVIATIONS * deviation) * width
    is_open: np.ndarray = (left == right).sum(axis=1) >= least
    return is_open


def shingle_sets(texts: list[str], words: int) -> list[np.ndarray]:
    """Each text's shingles of so many words: sorted hashes, each once."""
    shingles = shingle(sum_words(list(map(fold, texts))), words)
    return [sorted_unique(shingles.hashes[a:b]) for a, b in itertools.pairwise(shingles.offsets)]


def jaccard(shingles: list[np.ndarray], pairs: np.ndarray) -> np.ndarray:
    """Jaccard similarities of shingle sets: shape (m,).

    Args:
        shingles: of `shingle_sets`.
        pairs: shape (m, 2), places in `shingles`.
    """
    sets = _as_matrix(shingles)
    sizes = np.diff(sets.indptr)
    similarity = [np.empty(0)]
    for chunk in chunks(pairs):
        left, right = chunk[:, 0], chunk[:, 1]
        common = np.diff(sets[left].multiply(sets[right]).tocsr().indptr)
        similarity.append(common / (sizes[left] + sizes[right] - common))
    return np.concatenate(similarity)


def _as_matrix(sets: list[np.ndarray]) -> "csr_matrix":
    """Shingle sets as rows of a sparse 0/1 matrix whose columns are the hashes."""
    from scipy.sparse import csr_matrix

    sets = [(one >> np.uint64(1)).astype(np.int64) for one in sets]
    indices = np.concatenate(sets)
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in sets])])
    matrix = csr_matrix(
        (np.ones(len(indices), np.int32), indices, offsets), shape=(len(sets), 2**63 - 1)
    )
    matrix.has_canonical_format = True
    return matrix


def chunks(pairs: np.ndarray) -> Iterator[np.ndarray]:
    """Pairs, some of them at a time."""
    for first in range(0, len(pairs), PAIRS_AT_ONCE):
        yield pairs[first : first + PAIRS_AT_ONCE]
