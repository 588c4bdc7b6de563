"""The true similarity of candidate pairs."""

import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from artifacts.cache import cache_key
from artifacts.progress import Report
from artifacts.storage import files
from spark_jobs.clean.decide.documents import DocumentPart
from spark_jobs.clean.decide.in_memory.prepared import Prepared
from spark_jobs.clean.decide.similarity import chunks, jaccard, plausible, shingle_sets
from spark_jobs.runtime.cache import cached_rows
from spark_jobs.runtime.tasks import map_tasks

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
    spark: SparkSession,
    prepared: Prepared,
    numbers: np.ndarray,
    words: int,
    scratch: str,
    cache: str | None,
    report: Report,
) -> list[np.ndarray]:
    """The shingle sets of documents, made by tasks where their texts are: sorted hashes.

    Args:
        numbers: of documents in `prepared`; only candidates for near-copies are asked for.
        words: in a shingle.
        scratch: folder that the sets pass through.
        cache: folder of those that earlier runs made.
    """
    found = prepared.by_part(numbers)
    items = [(part, rows, f"{scratch}/shingles-{uuid.uuid4().hex}") for part, _, rows in found]
    key = cache_key(shingle_sets.__module__, ["numpy"], words=words)
    work = partial(_shingle, words=words, cache=cache, key=key)
    map_tasks(spark, "shingling candidates", items, work, report)
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

    ids = pa.chunked_array([part.read_rows("id", pa.array(rows))])
    table = cached_rows(cache, f"{key}-{part.prepared.origin}", ids, make)
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
