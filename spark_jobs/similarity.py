"""The true similarity of candidate pairs, of which most are known from the run before."""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.sparse import csr_matrix

from spark_jobs.kept import is_kept, name_kept
from spark_jobs.parquet import read_table, write_table
from spark_jobs.settings import CleanCorpusSettings

CODE_VERSION = "1"
"""Part of the name of kept similarities; raise it when this module gives others."""

PAIRS_AT_ONCE = 20_000
SIGNATURE_DEVIATIONS = 5
"""A pair is not looked at further if its signatures estimate the similarity this many standard
deviations below the threshold: fewer than one true pair in a million is lost by it."""

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
            plausible = _plausible(pairs, fetch_signatures, threshold)
            similarity[plausible] = _true_similarity(pairs[plausible], fetch_shingles)
        return similarity

    return compare


def name_similarities(folder: str, settings: CleanCorpusSettings) -> str:
    """Where the similarities of documents are kept that were prepared with these settings."""
    return name_kept(
        folder,
        "parquet",
        code_version=CODE_VERSION,
        near_duplicates=settings.near_duplicates.model_dump(mode="json"),
        split_seed=settings.split_seed,
    )


class KeptSimilarities:
    """Compares only the pairs that the run before has not compared.

    A document is known by the hash of its text, so it may have moved, or have another id.
    """

    def __init__(self, url: str, texts: np.ndarray, compare: Compare) -> None:
        """`texts` are the documents' text hashes, as numpy bytes of one length."""
        self._url = url
        self._texts = texts
        self._compare = compare
        self._known: pa.Table | None = None
        self._seen: list[pa.Table] = []
        if is_kept(url):
            self._known = read_table(url)

    def compare(self, pairs: np.ndarray) -> np.ndarray:
        """`Compare`, from what is known as far as it goes."""
        names = self._names(pairs)
        similarity = np.full(len(pairs), np.nan)
        unknown = np.ones(len(pairs), bool)
        if self._known is not None:
            places = pc.index_in(names, self._known["pair"])
            unknown = np.asarray(pc.is_null(places))
            known = self._known["similarity"].take(places.drop_null())
            similarity[~unknown] = known.to_numpy()
        similarity[unknown] = self._compare(pairs[unknown])
        self._seen.append(pa.table({"pair": names, "similarity": similarity}))
        return similarity

    def save(self) -> None:
        """Keep the pairs that were asked for, and no others."""
        if self._seen:
            write_table(self._url, pa.concat_tables(self._seen).combine_chunks())

    def _names(self, pairs: np.ndarray) -> pa.Array:
        """Both texts' hashes, the smaller one first."""
        left, right = self._texts[pairs[:, 0]], self._texts[pairs[:, 1]]
        first, last = np.where(left < right, (left, right), (right, left))
        width = 2 * self._texts.dtype.itemsize
        content = np.ascontiguousarray(np.stack([first, last], axis=1))
        return pa.Array.from_buffers(pa.binary(width), len(pairs), [None, pa.py_buffer(content)])


def _plausible(pairs: np.ndarray, fetch: FetchSignatures, threshold: float) -> np.ndarray:
    """Shape (m,): whether the signatures leave it open that a pair reaches the threshold.

    They hold what `spark_jobs.prepare` keeps of each hash.
    """
    numbers, places = np.unique(pairs, return_inverse=True)
    places = places.reshape(pairs.shape)
    signatures = fetch(numbers)
    width = signatures.shape[1]
    deviation = np.sqrt(threshold * (1 - threshold) / width)
    least = (threshold - SIGNATURE_DEVIATIONS * deviation) * width
    return np.concatenate(
        [
            (signatures[chunk[:, 0]] == signatures[chunk[:, 1]]).sum(axis=1) >= least
            for chunk in _chunks(places)
        ]
    )


def _true_similarity(pairs: np.ndarray, fetch: FetchShingles) -> np.ndarray:
    if not len(pairs):
        return np.empty(0)
    numbers, places = np.unique(pairs, return_inverse=True)
    return _jaccard(_as_matrix(fetch(numbers)), places.reshape(pairs.shape))


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
