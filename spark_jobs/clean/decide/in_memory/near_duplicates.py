"""Finds copies and near-copies among signed documents.

Candidates share a band of their MinHash signatures; a candidate pair is accepted only where the
true Jaccard similarity of the shingle sets reaches the threshold; the accepted pairs' connected
components are the duplicate clusters. Nothing depends on the order in which documents come.

All of it is whole-array work on one machine: 168 bytes a document for the bands, 16 bytes an edge
for the components.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from artifacts.numbers.arrays import run_starts, sorted_unique
from spark_jobs.clean.decide.in_memory.verify import Compare
from spark_jobs.clean.signatures import BUCKET_WINDOW

BANDS_AT_ONCE = 4
"""Each needs some 40 bytes a document besides the bands themselves."""

Buckets = tuple[np.ndarray, np.ndarray]
"""Of one band: the documents of shared buckets side by side, and where each one's bucket begins."""


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


def find_near_duplicates(bands: np.ndarray, compare: Compare, threshold: float) -> NearDuplicates:
    """Cluster documents of which no two are exact copies.

    Args:
        bands: uint64 of shape (n, bands), from `spark_jobs.clean.signatures.band_keys`.
        compare: true similarities of pairs (`spark_jobs.clean.decide.in_memory.verify`).
        threshold: least Jaccard similarity of near-duplicates.
    """
    count = len(bands)
    with ThreadPoolExecutor(BANDS_AT_ONCE) as threads:
        buckets = list(threads.map(_buckets, bands.T if count else []))
    stars = _unique(_star_pairs(buckets), count)
    first = _verify(stars, count, compare, threshold)
    component = components(first.edges, count)
    # Most pairs of a large bucket are connected by now; only the others can change a component.
    window = _unique(_window_pairs(buckets, component), count)
    rest = np.setdiff1d(window, stars, assume_unique=True)
    second = _verify(rest, count, compare, threshold)
    edges = first.edges + second.edges
    return NearDuplicates(
        components(edges, count),
        edges,
        candidates=len(stars) + len(rest),
        verified=first.compared + second.compared,
    )


def components(edges: Edges, count: int) -> np.ndarray:
    """The connected component of each of `count` documents; numbers mean nothing by themselves."""
    # Imported here, for all commands load this module and only cleaning needs them.
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    ones = np.ones(len(edges.left), np.bool_)
    graph = coo_matrix((ones, (edges.left, edges.right)), shape=(count, count))
    return connected_components(graph, directed=False)[1]


@dataclass(frozen=True)
class _Verified:
    edges: Edges
    compared: int
    """Pairs that the signatures had not ruled out."""


def _verify(codes: np.ndarray, count: int, compare: Compare, threshold: float) -> _Verified:
    """Compare the pairs of these codes (`_unique`), and keep those that reach the threshold."""
    pairs = np.stack([codes // count, codes % count], axis=1) if count else np.empty((0, 2), int)
    similarity = compare(pairs)
    kept = similarity >= threshold
    edges = Edges(pairs[kept, 0], pairs[kept, 1], similarity[kept])
    return _Verified(edges, int(np.sum(~np.isnan(similarity))))


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


def _buckets(keys: np.ndarray) -> Buckets:
    """The shared buckets of one band, whose keys are of shape (n,)."""
    order = np.argsort(keys, kind="stable")
    is_new = run_starts(keys[order])
    is_shared = ~is_new
    is_shared[:-1] |= ~is_new[1:]
    order, is_new = order[is_shared], is_new[is_shared]
    return order, np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))


def _unique(found: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Each pair once, in order, as one number: the smaller document's times `count`, and the
    larger's."""
    codes = [np.empty(0, np.int64)]
    for pairs in found:
        low, high = pairs.min(axis=1, initial=count), pairs.max(axis=1, initial=0)
        codes.append(low * count + high)
    return sorted_unique(np.concatenate(codes))
