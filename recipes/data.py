"""Batches of packed rows in an order that is a pure function of (seed, sample index)."""

from dataclasses import dataclass

import numpy as np
import torch

from artifacts.errors import DamagedArtifact
from artifacts.permutation import permute
from artifacts.shards import ShardSet

IGNORED = -100
"""Target of a position that has nothing to predict: the end of a segment, or padding."""
PADDING_SEGMENT = -1


@dataclass(frozen=True)
class Batch:
    """Rows ready for the model; every tensor has the shape (rows, sequence_length), int64."""

    tokens: torch.Tensor
    targets: torch.Tensor
    """The next token of the same segment, or `IGNORED`."""
    positions: torch.Tensor
    """Counted from each segment's start."""
    segments: torch.Tensor
    """Number of the segment within its row, `PADDING_SEGMENT` for padding."""

    @property
    def target_count(self) -> int:
        """How many positions have a target."""
        return int((self.targets != IGNORED).sum())

    @property
    def token_count(self) -> int:
        """How many positions are not padding."""
        return int((self.segments != PADDING_SEGMENT).sum())

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        move = {"device": device, "non_blocking": True}
        return Batch(
            self.tokens.to(**move),
            self.targets.to(**move),
            self.positions.to(**move),
            self.segments.to(**move),
        )


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
    length = shards.stats.sequence_length
    tokens = np.empty((len(rows), length), np.int64)
    positions = np.zeros((len(rows), length), np.int64)
    segments = np.full((len(rows), length), PADDING_SEGMENT, np.int64)
    for place, row in enumerate(rows):
        tokens[place], records = shards[int(row)]
        for number, (start, count, _, _) in enumerate(records.tolist()):
            positions[place, start : start + count] = np.arange(count)
            segments[place, start : start + count] = number
    if tokens.size and int(tokens.max()) >= shards.stats.vocab_size:
        place = int(np.argmax(tokens.max(axis=1)))
        raise DamagedArtifact(
            f"Row {int(rows[place])} of the {shards.split} split holds token {int(tokens.max())}, "
            f"outside the vocabulary of {shards.stats.vocab_size}. Delete the shards' folder and "
            "materialize `tokenized_shards` again."
        )
    targets = np.full((len(rows), length), IGNORED, np.int64)
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] != PADDING_SEGMENT)
    targets[:, :-1][same] = tokens[:, 1:][same]
    return Batch(*map(torch.from_numpy, (tokens, targets, positions, segments)))


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
