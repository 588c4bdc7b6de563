"""How much of the evaluated text stands in the training rows, word for word."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.numbers.arrays import sorted_unique
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_files import ShardFiles
from artifacts.shards.shard_set import Shard
from recipes.evaluation.documents import Document

ROWS_AT_ONCE = 4_096
EXAMPLES = 5
MOSTLY = 0.5
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


def find_contamination(
    documents: Sequence[Document], folder: Path, stats: ShardStats, length: int
) -> dict[str, Any]:
    """Look every run of `length` tokens of the documents up in the training split.

    Deduplication keeps near-copies of whole documents out of the training split; this finds
    passages that different documents share.

    Returns:
        `run_tokens`, `documents`, `mean_share` of a document's runs that were trained on,
        `mostly_trained_on` (documents with over half), and `examples` of those.
    """
    runs = [_runs(document.tokens, length) for document in documents]
    wanted = sorted_unique(np.concatenate(runs)) if runs else np.empty(0, np.uint64)
    found = np.zeros(len(wanted), bool)
    for tokens in _training_tokens(folder, stats):
        seen = _runs(tokens, length)
        places = np.minimum(np.searchsorted(wanted, seen), max(len(wanted) - 1, 0))
        if len(wanted):
            found[places[wanted[places] == seen]] = True
    shares = np.array(
        [found[np.searchsorted(wanted, run)].mean() if len(run) else 0.0 for run in runs]
    )
    mostly = np.flatnonzero(shares > MOSTLY)
    return {
        "run_tokens": length,
        "documents": len(documents),
        "mean_share": float(shares.mean()) if len(shares) else 0.0,
        "mostly_trained_on": len(mostly),
        "examples": [documents[number].id for number in mostly[:EXAMPLES]],
    }


def _training_tokens(folder: Path, stats: ShardStats) -> Iterator[np.ndarray]:
    """The tokens that are trained on, replayed ones included, in stretches of whole rows."""
    for entry in stats.shards:
        if entry.split in ("train", "replay") and entry.rows:
            shard = Shard(ShardFiles(folder), entry, stats)
            for first in range(0, entry.rows, ROWS_AT_ONCE):
                yield shard.tokens[first : first + ROWS_AT_ONCE].ravel()


def _runs(tokens: np.ndarray, length: int) -> np.ndarray:
    """A 64-bit hash of every run of tokens, shape (tokens - length + 1,); none in a short text."""
    count = max(len(tokens) - length + 1, 0)
    hashes = np.zeros(count, np.uint64)
    values = np.asarray(tokens).astype(np.uint64) + np.uint64(1)
    for place in range(length):
        hashes = hashes * _FACTOR + values[place : place + count]
        hashes ^= hashes >> np.uint64(29)
    return hashes
