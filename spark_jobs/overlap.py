"""How much of a text also stands in texts that must not be trained on, by runs of words.

The measure is the n-gram overlap of "Language Models are Few-Shot Learners" (Brown and others,
2020), appendix C, over the hashes of `spark_jobs.minhash`.
"""

from functools import lru_cache

import fsspec
import numpy as np

from spark_jobs.minhash import shingle
from spark_jobs.text import fold


def word_runs(texts: list[str], words: int) -> np.ndarray:
    """The hashes of all runs of so many words: sorted, each once. Shorter texts give none."""
    folded = [text for text in map(fold, texts) if text.count(" ") >= words - 1]
    return np.unique(shingle(folded, words).hashes)


def overlaps(texts: list[str], words: int, runs: np.ndarray) -> np.ndarray:
    """The share of each text's runs that are among `runs`; 0 for texts shorter than a run."""
    folded = [fold(text) for text in texts]
    shingles = shingle(folded, words)
    if not len(runs) or not len(folded):
        return np.zeros(len(texts))
    found = _among(shingles.hashes, runs).astype(np.int64)
    shares = np.add.reduceat(found, shingles.offsets[:-1]) / np.diff(shingles.offsets)
    long_enough = np.array([text.count(" ") >= words - 1 for text in folded])
    return np.where(long_enough, shares, 0)


def _among(hashes: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """Which hashes are among the sorted runs."""
    # Nearly all are not: a table of their lowest bits, which fits the processor's cache, tells that
    # without a search.
    bits = np.uint64(max(12, len(runs).bit_length() + 3))
    mask = (np.uint64(1) << bits) - np.uint64(1)
    table = np.zeros(1 << int(bits), bool)
    table[runs & mask] = True
    found = table[hashes & mask]
    candidates = hashes[found]
    places = np.minimum(np.searchsorted(runs, candidates), len(runs) - 1)
    found[found] = runs[places] == candidates
    return found


def save_runs(url: str, runs: np.ndarray) -> None:
    """Keep runs where tasks find them."""
    filesystem, path = fsspec.core.url_to_fs(url)
    filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
    with filesystem.open(path, "wb") as file:
        np.save(file, runs)


@lru_cache(maxsize=2)
def load_runs(url: str) -> np.ndarray:
    """Runs that were kept; a worker reads them once."""
    with fsspec.open(url, "rb") as file:
        return np.load(file)
