"""Finds near-copies among signed documents, in the memory of one machine.

Candidates share a band of their MinHash signatures; a candidate pair is accepted only where the
true Jaccard similarity of the shingle sets reaches the threshold; the accepted pairs' connected
components are the duplicate clusters. Nothing depends on the order in which documents come.

All of it is whole-array work: 168 bytes a document for the bands, 16 bytes an edge for the
components, and some 150 bytes a document for the other small columns, mostly ids.
"""

import itertools
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from artifacts.cache import cache_key
from artifacts.numbers import run_starts, sorted_unique
from artifacts.storage import files
from spark_jobs.clean.decide.decider import (
    DecisionContext,
    DocumentPart,
    chunks,
    jaccard,
    plausible,
    shingle_sets,
)
from spark_jobs.clean.forgotten import ForgottenTexts
from spark_jobs.clean.prepare import BUCKET_WINDOW, matrix_of
from spark_jobs.runtime.parquet import READERS, cached_rows
from spark_jobs.runtime.tasks import map_tasks


class PreparedParts:
    """The prepared parts, addressed by document number over all of them."""

    def __init__(self, parts: list[DocumentPart], forgotten: ForgottenTexts) -> None:
        self.parts = parts
        with ThreadPoolExecutor(READERS) as readers:
            tables = list(readers.map(lambda part: part.read(forgotten), parts))
        self.offsets = np.concatenate([[0], np.cumsum([table.num_rows for table in tables])])
        """Shape (parts + 1,): where each part's documents begin."""
        self.documents = pa.concat_tables(tables).combine_chunks()
        """Rows of `decider.DOCUMENT_SCHEMA`."""

    def by_part(self, numbers: np.ndarray) -> list[tuple[DocumentPart, np.ndarray, np.ndarray]]:
        """Parts with documents of these numbers: `(part, places in numbers, rows of the part)`."""
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], self.offsets)
        found = []
        for part, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first < last:
                places = order[first:last]
                found.append((self.parts[part], places, numbers[places] - self.offsets[part]))
        return found

    def fetch_matrix(self, numbers: np.ndarray, column: str, dtype: type) -> np.ndarray:
        """A fixed-size binary column as a matrix, one row a number."""

        def read(one: tuple[DocumentPart, np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
            part, places, rows = one
            return places, matrix_of(part.read_rows(column, pa.array(rows)), dtype)

        result: np.ndarray = np.empty((len(numbers), 0), dtype)
        with ThreadPoolExecutor(READERS) as readers:
            for places, values in readers.map(read, self.by_part(numbers)):
                if result.shape[1] != values.shape[1]:
                    result = np.empty((len(numbers), values.shape[1]), dtype)
                result[places] = values
        return result


Compare = Callable[[np.ndarray], np.ndarray]
"""Pairs of document numbers, of shape (m, 2), to their Jaccard similarities; NaN where the
signatures have ruled out that the threshold is reached."""
FetchSignatures = Callable[[np.ndarray], np.ndarray]
FetchShingles = Callable[[np.ndarray], list[np.ndarray]]


def comparison(
    fetch_signatures: FetchSignatures, fetch_shingles: FetchShingles, threshold: float
) -> Compare:
    """Compares pairs of documents, signatures first since they are cheaper.

    Args:
        fetch_signatures: document numbers (sorted) to their signatures.
        fetch_shingles: document numbers (sorted) to their shingle sets: sorted hashes, each once.
    """

    def compare(pairs: np.ndarray) -> np.ndarray:
        similarity = np.full(len(pairs), np.nan)
        if len(pairs):
            is_open = _plausible(pairs, fetch_signatures, threshold)
            similarity[is_open] = _true_similarity(pairs[is_open], fetch_shingles)
        return similarity

    return compare


def fetch_shingles(
    run: DecisionContext, prepared: PreparedParts, numbers: np.ndarray
) -> list[np.ndarray]:
    """The shingle sets of documents, made by tasks where their texts are: sorted hashes.

    Args:
        numbers: of documents in `prepared`; only candidates for near-copies are asked for.
    """
    words = run.settings.near_duplicates.shingle_words
    found = prepared.by_part(numbers)
    items = [(part, rows, f"{run.scratch}/shingles-{uuid.uuid4().hex}") for part, _, rows in found]
    key = cache_key("shingles", shingle_sets.__module__, ["numpy"], words=words)
    work = partial(_shingle, words=words, cache=run.cache, key=key)
    map_tasks(run.spark, "shingling candidates", items, work, run.report)
    sets: list[np.ndarray] = [np.empty(0, np.uint64)] * len(numbers)
    for (_, places, _), (_, _, url) in zip(found, items, strict=True):
        with files.open_file(url) as file, pa.ipc.open_stream(file) as stream:
            column = stream.read_all()["shingles"]
        for place, hashes in zip(places, column, strict=True):
            sets[place] = hashes.values.to_numpy()
    return sets


def _shingle(
    item: tuple[DocumentPart, np.ndarray, str], words: int, cache: str | None, key: str
) -> dict[str, Any]:
    part, rows, target = item

    def make(places: np.ndarray) -> pa.Table:
        texts = part.read_rows("text", pa.array(rows[places])).to_pylist()
        return pa.table({"shingles": pa.array(shingle_sets(texts, words), pa.list_(pa.uint64()))})

    # Not by id: of a document edited more than once, several texts lie among the past ones.
    hashes = pa.chunked_array([part.read_rows("text_hash", pa.array(rows))])
    table = cached_rows(cache, f"{key}-{part.prepared.origin}", hashes, make)
    with files.open_file(target, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return {}


def _plausible(pairs: np.ndarray, fetch: FetchSignatures, threshold: float) -> np.ndarray:
    """Shape (m,): whether the signatures leave it open that a pair reaches the threshold."""
    numbers, places = np.unique(pairs, return_inverse=True)
    places = places.reshape(pairs.shape)
    signatures = fetch(numbers)
    return np.concatenate(
        [
            plausible(signatures[chunk[:, 0]], signatures[chunk[:, 1]], threshold)
            for chunk in chunks(places)
        ]
    )


def _true_similarity(pairs: np.ndarray, fetch: FetchShingles) -> np.ndarray:
    if not len(pairs):
        return np.empty(0)
    numbers, places = np.unique(pairs, return_inverse=True)
    return jaccard(fetch(numbers), places.reshape(pairs.shape))


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
        bands: uint64 of shape (n, bands), from `spark_jobs.clean.prepare.band_keys`.
        compare: true similarities of pairs (`spark_jobs.clean.decide.near_duplicates`).
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
    # Those were compared already.
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
class _ComparedPairs:
    edges: Edges
    compared: int
    """Pairs that the signatures had not ruled out."""


def _verify(codes: np.ndarray, count: int, compare: Compare, threshold: float) -> _ComparedPairs:
    """Compare the pairs of these codes (`_unique`), and keep those that reach the threshold."""
    pairs = np.stack([codes // count, codes % count], axis=1) if count else np.empty((0, 2), int)
    similarity = compare(pairs)
    kept = similarity >= threshold
    edges = Edges(pairs[kept, 0], pairs[kept, 1], similarity[kept])
    return _ComparedPairs(edges, int(np.sum(~np.isnan(similarity))))


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
