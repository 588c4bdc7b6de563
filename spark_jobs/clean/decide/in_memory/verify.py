"""The true similarity of candidate pairs."""

import itertools
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from artifacts.arrays import sorted_unique
from artifacts.progress import Report
from artifacts.storage import files
from spark_jobs.clean.decide.documents import DocumentPart
from spark_jobs.clean.decide.in_memory.prepared import Prepared
from spark_jobs.runtime.tasks import map_tasks
from spark_jobs.text.normalize import fold
from spark_jobs.text.shingles import shingle, sum_words

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

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


def fetch_shingles(
    spark: SparkSession,
    prepared: Prepared,
    numbers: np.ndarray,
    words: int,
    scratch: str,
    report: Report,
) -> list[np.ndarray]:
    """The shingle sets of documents, made by tasks where their texts are: sorted hashes.

    Args:
        numbers: of documents in `prepared`; only candidates for near-copies are asked for.
        words: in a shingle.
        scratch: folder that the sets pass through.
    """
    found = prepared.by_part(numbers)
    items = [(part, rows, f"{scratch}/shingles-{uuid.uuid4().hex}") for part, _, rows in found]
    map_tasks(spark, "shingling candidates", items, partial(_shingle, words=words), report)
    sets: list[np.ndarray] = [np.empty(0, np.uint64)] * len(numbers)
    for (_, places, _), (_, _, url) in zip(found, items, strict=True):
        with files.open_file(url) as file, pa.ipc.open_stream(file) as stream:
            column = stream.read_all()["shingles"]
        for place, hashes in zip(places, column, strict=True):
            sets[place] = hashes.values.to_numpy()
    return sets


def _shingle(item: tuple[DocumentPart, np.ndarray, str], words: int) -> dict[str, Any]:
    part, rows, target = item
    sets = shingle_sets(part.read_rows("text", pa.array(rows)).to_pylist(), words)
    table = pa.table({"shingles": pa.array(sets, pa.list_(pa.uint64()))})
    with files.open_file(target, "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return {}


def shingle_sets(texts: list[str], words: int) -> list[np.ndarray]:
    """Each text's shingles of so many words: sorted hashes, each once."""
    shingles = shingle(sum_words(list(map(fold, texts))), words)
    return [sorted_unique(shingles.hashes[a:b]) for a, b in itertools.pairwise(shingles.offsets)]


def _plausible(pairs: np.ndarray, fetch: FetchSignatures, threshold: float) -> np.ndarray:
    """Shape (m,): whether the signatures leave it open that a pair reaches the threshold."""
    numbers, places = np.unique(pairs, return_inverse=True)
    places = places.reshape(pairs.shape)
    signatures = fetch(numbers)
    return np.concatenate(
        [
            plausible(signatures[chunk[:, 0]], signatures[chunk[:, 1]], threshold)
            for chunk in _chunks(places)
        ]
    )


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


def _true_similarity(pairs: np.ndarray, fetch: FetchShingles) -> np.ndarray:
    if not len(pairs):
        return np.empty(0)
    numbers, places = np.unique(pairs, return_inverse=True)
    return jaccard(fetch(numbers), places.reshape(pairs.shape))


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


def jaccard(shingles: list[np.ndarray], pairs: np.ndarray) -> np.ndarray:
    """Jaccard similarities of shingle sets: shape (m,).

    Args:
        shingles: of `shingle_sets`.
        pairs: shape (m, 2), places in `shingles`.
    """
    sets = _as_matrix(shingles)
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
