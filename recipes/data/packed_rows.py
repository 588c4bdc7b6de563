"""Batches of packed rows: targets, positions and segment numbers, made for all rows at once."""

import numpy as np
import pyarrow.compute as pc
import torch

from artifacts.errors import DamagedArtifact, make_command
from artifacts.shards.format import PackedRows
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import IGNORED, PADDING_SEGMENT, Batch


def read_batch(shards: ShardSet, rows: np.ndarray, samples: np.ndarray | None = None) -> Batch:
    """Read rows and derive targets, positions and segment numbers; the same for any samples.

    Raises:
        DamagedArtifact: a token id lies outside the shards' vocabulary.
    """
    stored = shards.read(rows)
    shape = stored.tokens.shape
    check_vocabulary(shards, rows, stored.tokens)
    starts, ends, numbers = _segment_bounds(stored)
    tokens = stored.tokens.astype(np.int64)
    targets = np.empty(shape, np.int64)
    targets.reshape(-1)[:-1] = stored.tokens.reshape(-1)[1:]
    if stored.targets is not None:
        given = np.append(stored.targets.reshape(-1)[1:] == 0, True)
        targets.reshape(-1)[given] = IGNORED
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


def _segment_bounds(rows: PackedRows) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(starts, ends, numbers within their row)` of the segments of rows laid end to end."""
    counts = np.diff(rows.row_offsets)
    length = rows.tokens.shape[1]
    starts = np.repeat(np.arange(len(counts)) * length, counts) + rows.segments["start"]
    numbers = np.arange(len(starts)) - np.repeat(rows.row_offsets[:-1], counts)
    return starts, starts + rows.segments["length"], numbers


def check_vocabulary(shards: ShardSet, rows: np.ndarray, tokens: np.ndarray) -> None:
    """Raise DamagedArtifact where a token id lies outside the shards' vocabulary."""
    if tokens.size and int(tokens.max()) >= shards.stats.vocab_size:
        shard, row = shards.locate(int(rows[np.argmax(tokens.max(axis=1))]))
        raise DamagedArtifact(
            f"Row {row} of the shard {shard.name} holds token {int(tokens.max())}, outside the "
            f"vocabulary of {shards.stats.vocab_size}. Set the shards aside and make them again "
            f"with: llm-assets doctor --repair && {make_command('tokenized_shards')}"
        )


def worker_share(rows: np.ndarray, rank: int, workers: int) -> np.ndarray:
    """A worker's contiguous part of the global batch, of equal size for every worker."""
    share = len(rows) // workers
    return rows[rank * share : (rank + 1) * share]


def bytes_per_token(shards: ShardSet) -> float:
    """Bytes of cleaned text a token of this split, end tokens included."""
    size = tokens = 0
    for shard in shards.shards:
        documents = shard.documents(["bytes", "tokens"])
        size += pc.sum(documents["bytes"]).as_py()
        tokens += pc.sum(documents["tokens"]).as_py()
    return size / tokens
