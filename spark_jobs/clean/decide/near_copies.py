"""Near-copies among signed documents, in the memory of one machine.

Candidates share a band of their MinHash signatures. A candidate pair is accepted only if the true
Jaccard similarity of its shingle sets reaches the threshold, and the connected components of the
accepted pairs are the duplicate clusters. The order of the documents changes nothing.

All work is on whole arrays: 168 bytes per document for the bands, 16 bytes per edge for the
components, and some 150 bytes per document for the other small columns, mostly ids. `pairs` does
the same by Spark's joins, and compares two texts by the functions here.
"""

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from artifacts.cache import cache_key
from artifacts.numbers import ends_of, run_starts, sorted_unique, spans
from spark_jobs.clean.prepare import BUCKET_WINDOW, NO_SAMPLE, fixed_binary
from spark_jobs.runtime.parquet import cached_rows
from spark_jobs.settings import NearDuplicateSettings
from spark_jobs.text import fold, shingle, sum_words

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

PAIRS_AT_ONCE = 20_000
SIGNATURE_DEVIATIONS = 5
"""A pair is ruled out if its signatures estimate the similarity this many standard deviations below
the threshold: fewer than one true pair in a million is lost by that."""


def plausible(left: np.ndarray, right: np.ndarray, threshold: float) -> np.ndarray:
    """Whether each pair of signatures may still reach the threshold: shape (m,).

    Args:
        left, right: shape (m, permutations), the lowest byte of each hash (`clean.prepare`).
    """
    width = left.shape[1]
    # Of a binomial: each of `width` hashes agrees with the probability of the true similarity.
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
        # The product of two 0/1 rows has an entry for each hash that both hold.
        common = np.diff(sets[left].multiply(sets[right]).tocsr().indptr)
        similarity.append(common / (sizes[left] + sizes[right] - common))
    return np.concatenate(similarity)


def _as_matrix(sets: list[np.ndarray]) -> "csr_matrix":
    """Shingle sets as rows of a sparse 0/1 matrix whose columns are the hashes."""
    from scipy.sparse import csr_matrix

    # scipy's column numbers are signed, so the lowest of a hash's 64 bits is dropped.
    sets = [(hashes >> np.uint64(1)).astype(np.int64) for hashes in sets]
    indices = np.concatenate(sets)
    offsets = ends_of(np.array([len(hashes) for hashes in sets]))
    matrix = csr_matrix(
        (np.ones(len(indices), np.int32), indices, offsets), shape=(len(sets), 2**63 - 1)
    )
    # `shingle_sets` sorts them and removes repetitions; scipy would search everything for these.
    matrix.has_canonical_format = True
    return matrix


def chunks(pairs: np.ndarray) -> Iterator[np.ndarray]:
    """Split pairs into chunks, which bound the memory of a comparison."""
    for first in range(0, len(pairs), PAIRS_AT_ONCE):
        yield pairs[first : first + PAIRS_AT_ONCE]


Compare = Callable[[np.ndarray], np.ndarray]
"""Pairs of document numbers, of shape (m, 2), to their Jaccard similarities; NaN where the
signatures have ruled out that the threshold is reached."""


def comparison(
    fetch_signatures: Callable[[np.ndarray], np.ndarray],
    fetch_shingles: Callable[[np.ndarray], list[np.ndarray]],
    threshold: float,
) -> Compare:
    """Compare pairs of documents, by their signatures first, since these are cheaper.

    Args:
        fetch_signatures: document numbers (sorted) to their signatures.
        fetch_shingles: document numbers (sorted) to their shingle sets: sorted hashes, each once.
    """

    def compare(pairs: np.ndarray) -> np.ndarray:
        similarity = np.full(len(pairs), np.nan)
        if len(pairs):
            # A document's signature is fetched once, however many pairs it is in.
            numbers, places = np.unique(pairs, return_inverse=True)
            signatures = fetch_signatures(numbers)
            is_open = np.concatenate(
                [
                    plausible(signatures[chunk[:, 0]], signatures[chunk[:, 1]], threshold)
                    for chunk in chunks(places)
                ]
            )
            if is_open.any():
                numbers, places = np.unique(pairs[is_open], return_inverse=True)
                similarity[is_open] = jaccard(fetch_shingles(numbers), places)
        return similarity

    return compare


def remember_pairs(
    compare: Compare, hashes: np.ndarray, settings: NearDuplicateSettings, cache: str | None
) -> Compare:
    """Wrap a comparison: pairs of texts that an earlier run has compared come from the cache.

    Args:
        hashes: uint8 of shape (documents, bytes); equal texts have equal rows.
        cache: folder of what earlier runs made.
    """
    decided_by = settings.model_dump(mode="json")
    key = cache_key("similarities", __name__, ["numpy", "scipy"], settings=decided_by)

    def compare_new(pairs: np.ndarray) -> np.ndarray:
        # A pair is named by its texts' hashes, since the numbers of documents change between runs.
        # The lower number comes first, and numbers rise with the hashes (`in_memory.group_exact`):
        # so a pair has one name in all runs.
        names = hashes[pairs].reshape(len(pairs), 2 * hashes.shape[1])
        similarity = cached_rows(
            cache,
            key,
            pa.chunked_array([fixed_binary(names)]),
            lambda places: pa.table({"similarity": compare(pairs[places])}),
        )
        return similarity["similarity"].to_numpy()

    return compare_new


BANDS_AT_ONCE = 4
"""Bands that are sorted at a time; each needs some 40 bytes per document besides the bands."""

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
    """Cluster documents, of which no two are exact copies, by their near-copies.

    Args:
        bands: uint64 of shape (n, bands), from `spark_jobs.clean.prepare.band_keys`.
        compare: true similarities of pairs.
    """
    count = len(bands)
    with ThreadPoolExecutor(BANDS_AT_ONCE) as threads:
        buckets = list(threads.map(_buckets, bands.T if count else []))
    # First each document with its bucket's first only: so few pairs mostly connect the bucket.
    stars = _unique(_star_pairs(buckets), count)
    first, compared_first = _verify(stars, count, compare, threshold)
    component = components(first, count)
    # Most pairs of a large bucket are connected by now; only the others can change a component.
    window = _unique(_window_pairs(buckets, component), count)
    # The stars are among them, and were compared already.
    rest = np.setdiff1d(window, stars, assume_unique=True)
    second, compared_second = _verify(rest, count, compare, threshold)
    edges = first + second
    return NearDuplicates(
        components(edges, count),
        edges,
        candidates=len(stars) + len(rest),
        verified=compared_first + compared_second,
    )


COMMON_GROUPS = 20
"""A shingle in more groups of near-copies than this is boilerplate, which links no two texts: one
clause that all contracts have would make them one family."""
VERSION_SHARE = 0.4
"""Share of the smaller text's other shingles that two versions have in common. Decontamination
drops from a half on (`DecontaminationSettings`); the rest is what a sample may be wrong by."""
FEWEST_COMMON = 4
"""Sampled shingles that two versions have in common at least, however much is boilerplate."""
PROBED = 1 << 30
"""Only texts that share a sampled shingle below this, a quarter of all, are searched: one pair of
versions in a thousand is lost by that, and most texts that have none need not be compared."""
_SAMPLES_AT_ONCE = 1 << 24


def find_versions(samples: np.ndarray) -> Edges:
    """Link texts that share much of what few others have: versions of one document.

    Args:
        samples: uint32 of shape (texts, any), of `prepare.sample_shingles`; one text of each group
            of near-copies, since these count as one.
    """
    probed = [_shared_samples(samples, *ends)[1] for ends in _ranges(samples, PROBED)]
    searched = sorted_unique(np.concatenate(probed))
    samples, count = samples[searched], len(searched)
    sizes = np.sum(samples != NO_SAMPLE, axis=1)
    pairs, common = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for ends in _ranges(samples, int(NO_SAMPLE)):
        group, text = _shared_samples(samples, *ends)
        is_common = np.bincount(group)[group] > COMMON_GROUPS
        sizes -= np.bincount(text[is_common], minlength=count)
        group, text = group[~is_common], text[~is_common]
        found = [np.empty(0, np.int64)]
        for distance in range(1, COMMON_GROUPS):
            same = np.flatnonzero(group[distance:] == group[:-distance])
            found.append(text[same] * count + text[same + distance])
        codes, times = np.unique(np.concatenate(found), return_counts=True)
        pairs.append(codes)
        common.append(times)
    codes, places = np.unique(np.concatenate(pairs), return_inverse=True)
    shared = np.bincount(places, np.concatenate(common), len(codes))
    left, right = codes // max(1, count), codes % max(1, count)
    enough = np.maximum(FEWEST_COMMON, VERSION_SHARE * np.minimum(sizes[left], sizes[right]))
    left, right = searched[left[shared >= enough]], searched[right[shared >= enough]]
    return Edges(left, right, np.zeros(len(left)))


def _ranges(samples: np.ndarray, end: int) -> Iterator[tuple[int, int]]:
    """Cut the numbers below `end` into ranges, which bound the memory of a comparison."""
    step = (int(NO_SAMPLE) + 1) // max(1, -(-samples.size // _SAMPLES_AT_ONCE))
    for first in range(0, end, step):
        yield first, min(first + step, end)


def _shared_samples(samples: np.ndarray, first: int, end: int) -> tuple[np.ndarray, np.ndarray]:
    """Sampled shingles from `first` to below `end` that several texts have: side by side, a number
    of each, and the text."""
    is_chosen = samples < end
    is_chosen &= samples >= first
    # The shingle above the text's number, so that one sort brings the texts of each together.
    text = np.repeat(np.arange(len(samples), dtype=np.uint64), is_chosen.sum(axis=1))
    keys = np.sort(samples[is_chosen].astype(np.uint64) << np.uint64(32) | text)
    begins = np.flatnonzero(run_starts(keys >> np.uint64(32)))
    lengths = np.diff(np.append(begins, len(keys)))
    begins, lengths = begins[lengths > 1], lengths[lengths > 1]
    text = keys[spans(begins, lengths)] & np.uint64(0xFFFFFFFF)
    return np.repeat(np.arange(len(begins)), lengths), text.astype(np.int64)


def components(edges: Edges, count: int) -> np.ndarray:
    """The connected component of each of `count` documents; the numbers have no meaning."""
    # Imported here, since all commands load this module, and only cleaning needs scipy.
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    ones = np.ones(len(edges.left), np.bool_)
    graph = coo_matrix((ones, (edges.left, edges.right)), shape=(count, count))
    return connected_components(graph, directed=False)[1]


def _verify(codes: np.ndarray, count: int, compare: Compare, threshold: float) -> tuple[Edges, int]:
    """Compare the pairs of these codes (`_unique`); return those that reach the threshold.

    Also returns how many were compared, which the signatures had not ruled out.
    """
    pairs = np.stack([codes // count, codes % count], axis=1) if count else np.empty((0, 2), int)
    similarity = compare(pairs)
    # NaN, of a pair that was ruled out, is not above any threshold.
    kept = similarity >= threshold
    edges = Edges(pairs[kept, 0], pairs[kept, 1], similarity[kept])
    return edges, int(np.sum(~np.isnan(similarity)))


def _star_pairs(buckets: list[Buckets]) -> Iterator[np.ndarray]:
    """Pair every document of a bucket with the bucket's first."""
    for order, first in buckets:
        member = first != np.arange(len(order))
        yield np.stack([order[first[member]], order[member]], axis=1)


def _window_pairs(buckets: list[Buckets], component: np.ndarray) -> Iterator[np.ndarray]:
    """Pair every document of a bucket with those after it, unless they are in one component."""
    for order, first in buckets:
        places = np.arange(len(order))
        pairs = [np.empty((0, 2), np.int64)]
        for distance in range(1, BUCKET_WINDOW + 1):
            # Buckets lie one after another, so the same bucket this far on is a pair.
            places = places[places + distance < len(order)]
            places = places[first[places] == first[places + distance]]
            if not len(places):
                break
            left, right = order[places], order[places + distance]
            apart = component[left] != component[right]
            pairs.append(np.stack([left[apart], right[apart]], axis=1))
        yield np.concatenate(pairs)


def _buckets(keys: np.ndarray) -> Buckets:
    """The shared buckets of a band, from its keys: shape (n,)."""
    # Stable, so that the documents of a bucket stay in the order of their numbers.
    order = np.argsort(keys, kind="stable")
    is_new = run_starts(keys[order])
    # A bucket is shared if the key before or behind is the same.
    is_shared = ~is_new
    is_shared[:-1] |= ~is_new[1:]
    order, is_new = order[is_shared], is_new[is_shared]
    return order, np.maximum.accumulate(np.where(is_new, np.arange(len(order)), 0))


def _unique(groups: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Encode pairs as sorted numbers, each once: the smaller document times `count`, plus the
    larger."""
    codes = [np.empty(0, np.int64)]
    for pairs in groups:
        low, high = pairs.min(axis=1, initial=count), pairs.max(axis=1, initial=0)
        codes.append(low * count + high)
    return sorted_unique(np.concatenate(codes))
