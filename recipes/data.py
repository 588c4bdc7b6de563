"""Batches of packed rows in an order that is a pure function of (seed, sample index)."""

from collections.abc import Sequence

import numpy as np
import torch

from artifacts.errors import DamagedArtifact
from artifacts.permutation import permute
from artifacts.shards import ShardSet
from recipes.batch import IGNORED, PADDING_SEGMENT, Batch


def global_rows(first_sample: int, count: int, rows: int, seed: int) -> np.ndarray:
    """Row numbers of the samples `first_sample … first_sample + count - 1` of an endless order.

    Every epoch is another permutation of all rows; a batch may span two epochs.
    """
    samples = np.arange(first_sample, first_sample + count)
    epochs, positions = np.divmod(samples, rows)
    chosen = np.empty(count, np.int64)
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        chosen[of_epoch] = permute(positions[of_epoch], rows, key=seed * 1_000_003 + int(epoch))
    return chosen


def read_batch(shards: ShardSet, rows: np.ndarray) -> Batch:
    """Read rows and derive targets, positions and segment numbers.

    Raises:
        DamagedArtifact: a token id lies outside the shards' vocabulary.
    """
    shape = (len(rows), shards.stats.sequence_length)
    stored = np.empty(shape, shards.stats.dtype)
    records = []
    for place, row in enumerate(rows.tolist()):
        stored[place], of_row = shards[row]
        records.append(of_row)
    _check_vocabulary(shards, rows, stored)
    starts, ends, numbers = _segment_bounds(records, shape[1])
    tokens = stored.astype(np.int64)
    targets = np.empty(shape, np.int64)
    targets[:, :-1] = stored[:, 1:]
    targets.reshape(-1)[ends - 1] = IGNORED
    # What lies between one segment's end and the next one's start is padding.
    bounds = np.append(np.column_stack((starts, ends)).ravel(), tokens.size)
    lengths = np.diff(bounds, prepend=0)
    labels = np.full(len(lengths), PADDING_SEGMENT, np.int32)
    labels[1::2] = numbers
    segments = np.repeat(labels, lengths).reshape(shape)
    positions = np.arange(tokens.size, dtype=np.int32).reshape(shape)
    positions -= np.repeat((bounds - lengths).astype(np.int32), lengths).reshape(shape)
    if lengths[::2].any():
        padding = segments == PADDING_SEGMENT
        targets[padding], positions[padding] = IGNORED, 0
    return Batch(*map(torch.from_numpy, (tokens, targets, positions, segments)))


def _segment_bounds(
    records: Sequence[np.ndarray], length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(starts, ends, numbers within their row)` of the segments of rows laid end to end.

    Args:
        records: the `SEGMENT` records of each row.
        length: tokens a row.
    """
    counts = np.array([len(of_row) for of_row in records])
    joined = np.concatenate(records)
    starts = np.repeat(np.arange(len(counts)) * length, counts) + joined["start"]
    numbers = np.arange(len(joined)) - np.repeat(np.cumsum(counts) - counts, counts)
    return starts, starts + joined["length"], numbers


def _check_vocabulary(shards: ShardSet, rows: np.ndarray, tokens: np.ndarray) -> None:
    if tokens.size and int(tokens.max()) >= shards.stats.vocab_size:
        place = int(np.argmax(tokens.max(axis=1)))
        raise DamagedArtifact(
            f"Row {int(rows[place])} of the {shards.split} split holds token {int(tokens.max())}, "
            f"outside the vocabulary of {shards.stats.vocab_size}. Delete the shards' folder and "
            "materialize `tokenized_shards` again."
        )


def worker_share(rows: np.ndarray, rank: int, workers: int) -> np.ndarray:
    """A worker's contiguous part of the global batch, of equal size for every worker."""
    share = len(rows) // workers
    return rows[rank * share : (rank + 1) * share]


def bytes_per_token(shards: ShardSet) -> float:
    """Bytes of cleaned text a token of this split, end tokens included."""
    size = tokens = 0
    for shard in shards.shards:
        documents = shard.documents()
        size += sum(documents["bytes"].to_pylist())
        tokens += sum(documents["tokens"].to_pylist())
    return size / tokens
