"""Finds copies and near-copies among signed documents.

Candidates share a band of their MinHash signatures; a candidate pair is accepted only where the
true Jaccard similarity of the shingle sets reaches the threshold; the accepted pairs' connected
components are the duplicate clusters. Nothing depends on the order in which documents come.

All of it is whole-array work on one machine: 168 bytes a document for the bands, 16 bytes an edge
for the components, so some 100 million of each on a driver of 64 GB. Past that the components step
is the large-star and small-star algorithm (Kiveris and others, 2014) as Spark joins.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_matrix, csr_matrix
from scipy.sparse.csgraph import connected_components

BUCKET_WINDOW = 500
"""In a larger bucket, a document is compared with the bucket's first and its next so many."""
PAIRS_AT_ONCE = 20_000
SIGNATURE_DEVIATIONS = 5
"""A pair is not looked at further if its signatures estimate the similarity this many standard
deviations below the threshold: fewer than one true pair in a million is lost by it."""

Buckets = tuple[np.ndarray, np.ndarray]
"""Of one band: the documents of shared buckets side by side, and where each one's bucket begins."""

FetchSignatures = Callable[[np.ndarray], np.ndarray]
FetchShingles = Callable[[np.ndarray], list[np.ndarray]]


@dataclass(frozen=True)
class Edges:
    """Verified pairs of documents."""

    left: np.ndarray
    right: np.ndarray
    similarity: np.ndarray

    def __add__(self, other: "Edges") -> "Edges":
        return Edges(
            np.concatenate([self.left, other.left]),
            np.concatenate([self.right, other.right]),
            np.concatenate([self.similarity, other.similarity]),
        )


@dataclass(frozen=True)
class NearDuplicates:
    """The outcome for documents numbered 0 to n - 1."""

    component: np.ndarray
    """Shape (n,): equal numbers mean one cluster."""
    edges: Edges
    candidates: int
    """Pairs that shared a band."""
    verified: int
    """Pairs whose true similarity was worked out."""


def find_near_duplicates(
    bands: np.ndarray,
    fetch_signatures: FetchSignatures,
    fetch_shingles: FetchShingles,
    threshold: float,
) -> NearDuplicates:
    """Cluster documents of which no two are exact copies.

    Args:
        bands: uint64 of shape (n, bands), from `spark_jobs.minhash.band_keys`.
        fetch_signatures: document numbers (sorted) to their signatures.
        fetch_shingles: document numbers (sorted) to their shingle sets: sorted hashes, each once.
        threshold: least Jaccard similarity of near-duplicates.
    """
    count = len(bands)
    verifier = _Verifier(fetch_signatures, fetch_shingles, threshold)
    buckets = list(_buckets(bands))
    stars = _unique_pairs(_star_pairs(buckets), count)
    edges = verifier.verify(stars)
    component = components(edges, count)
    # Most pairs of a large bucket are connected by now; only the others can change a component.
    rest = _unique_pairs(_window_pairs(buckets, component), count)
    rest = np.setdiff1d(rest, stars, assume_unique=True)
    edges = edges + verifier.verify(rest)
    return NearDuplicates(
        components(edges, count), edges, len(stars) + len(rest), verifier.verified
    )


def components(edges: Edges, count: int) -> np.ndarray:
    """The connected component of each of `count` documents; numbers mean nothing by themselves."""
    ones = np.ones(len(edges.left), np.bool_)
    graph = coo_matrix((ones, (edges.left, edges.right)), shape=(count, count))
    return connected_components(graph, directed=False)[1]


class _Verifier:
    """Works out true similarities, signatures first since they are cheaper."""

    def __init__(
        self, fetch_signatures: FetchSignatures, fetch_shingles: FetchShingles, threshold: float
    ) -> None:
        self._fetch_signatures = fetch_signatures
        self._fetch_shingles = fetch_shingles
        self._threshold = threshold
        self.verified = 0

    def verify(self, pairs: np.ndarray) -> Edges:
        """Keep the pairs, of shape (m, 2), that reach the threshold."""
        pairs = self._plausible(pairs)
        self.verified += len(pairs)
        if not len(pairs):
            return Edges(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0))
        numbers, places = np.unique(pairs, return_inverse=True)
        sets = _as_matrix(self._fetch_shingles(numbers))
        similarity = _jaccard(sets, places.reshape(pairs.shape))
        kept = similarity >= self._threshold
        return Edges(pairs[kept, 0], pairs[kept, 1], similarity[kept])

    def _plausible(self, pairs: np.ndarray) -> np.ndarray:
        if not len(pairs):
            return pairs
        numbers, places = np.unique(pairs, return_inverse=True)
        places = places.reshape(pairs.shape)
        signatures = self._fetch_signatures(numbers)
        width = signatures.shape[1]
        deviation = np.sqrt(self._threshold * (1 - self._threshold) / width)
        least = (self._threshold - SIGNATURE_DEVIATIONS * deviation) * width
        kept = [
            (signatures[chunk[:, 0]] == signatures[chunk[:, 1]]).sum(axis=1) >= least
            for chunk in _chunks(places)
        ]
        return pairs[np.concatenate(kept)]


def _star_pairs(buckets: list[Buckets]) -> Iterator[np.ndarray]:
    """Every document of a bucket with the bucket's first."""
    for order, first in buckets:
        member = first != np.arange(len(order))
        yield np.stack([order[first[member]], order[member]], axis=1)


def _window_pairs(buckets: list[Buckets], component: np.ndarray) -> Iterator[np.ndarray]:
    """Every document of a bucket with those after it, where not yet in one component."""
    for order, first in buckets:
        places = np.arange(len(order))
        found = [np.empty((0, 2), np.int64)]
        for distance in range(1, BUCKET_WINDOW + 1):
            places = places[places + distance < len(order)]
            places = places[first[places] == first[places + distance]]
            if not len(places):
                break
            left, right = order[places], order[places + distance]
            apart = component[left] != component[right]
            found.append(np.stack([left[apart], right[apart]], axis=1))
        yield np.concatenate(found)


def _buckets(bands: np.ndarray) -> Iterator[Buckets]:
    for band in range(bands.shape[1] if len(bands) else 0):
        keys = bands[:, band]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        same = keys[1:] == keys[:-1]
        shared = np.concatenate([same, [False]]) | np.concatenate([[False], same])
        order, keys = order[shared], keys[shared]
        new = np.concatenate([[True], keys[1:] != keys[:-1]]) if len(keys) else np.empty(0, bool)
        yield order, np.maximum.accumulate(np.where(new, np.arange(len(order)), 0))


def _unique_pairs(found: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Pairs with the smaller number first, each once, in order."""
    codes = np.empty(0, np.int64)
    for pairs in found:
        low, high = pairs.min(axis=1, initial=count), pairs.max(axis=1, initial=0)
        codes = np.union1d(codes, low * count + high)
    return np.stack([codes // count, codes % count], axis=1) if count else np.empty((0, 2), int)


def _as_matrix(sets: list[np.ndarray]) -> csr_matrix:
    """Shingle sets as rows of a sparse 0/1 matrix whose columns are the hashes."""
    sets = [(one >> np.uint64(1)).astype(np.int64) for one in sets]
    indices = np.concatenate(sets)
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in sets])])
    matrix = csr_matrix(
        (np.ones(len(indices), np.int32), indices, offsets), shape=(len(sets), 2**63 - 1)
    )
    matrix.has_canonical_format = True
    return matrix


def _jaccard(sets: csr_matrix, pairs: np.ndarray) -> np.ndarray:
    sizes = np.diff(sets.indptr)
    similarity = [np.empty(0)]
    for chunk in _chunks(pairs):
        left, right = chunk[:, 0], chunk[:, 1]
        common = np.diff(sets[left].multiply(sets[right]).tocsr().indptr)
        similarity.append(common / (sizes[left] + sizes[right] - common))
    return np.concatenate(similarity)


def _chunks(pairs: np.ndarray) -> Iterator[np.ndarray]:
    for first in range(0, len(pairs), PAIRS_AT_ONCE):
        yield pairs[first : first + PAIRS_AT_ONCE]
