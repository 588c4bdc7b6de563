"""Batches, as models take them, made of rows of the shards: packed texts, or an example each."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow.compute as pc
import torch

from artifacts.errors import DamagedArtifact, make_command
from artifacts.shards.format import PackedRows
from artifacts.shards.shard_set import ShardSet

IGNORED = -100
"""Target of a position that has nothing to predict: the end of a segment, or padding."""
PADDING_SEGMENT = -1


class TensorBatch:
    """Tensors that go to a device together, the fields of a frozen dataclass."""

    targets: torch.Tensor

    @property
    def target_count(self) -> int:
        """How many positions have a target."""
        return int((self.targets != IGNORED).sum())

    def to(self, device: torch.device) -> Self:
        """The same batch on another device."""
        return type(self)(*(tensor.to(device, non_blocking=True) for tensor in vars(self).values()))

    def pin_memory(self) -> Self:
        """The same batch in memory from which a GPU copies by itself."""
        return type(self)(*(tensor.pin_memory() for tensor in vars(self).values()))


@dataclass(frozen=True)
class Batch(TensorBatch):
    """Rows ready for the model; every tensor has the shape (rows, sequence_length)."""

    tokens: torch.Tensor
    targets: torch.Tensor
    """The next token of the same segment, or `IGNORED`."""
    positions: torch.Tensor
    """Counted from each segment's start."""
    segments: torch.Tensor
    """Number of the segment within its row, `PADDING_SEGMENT` for padding."""

    @property
    def token_count(self) -> int:
        """How many positions are not padding."""
        return int((self.segments != PADDING_SEGMENT).sum())

    @property
    def pair_count(self) -> int:
        """How many pairs of positions attend: each with itself and those before it in its text."""
        return int((self.positions + 1)[self.segments != PADDING_SEGMENT].sum())


class EncoderBatch(Batch):
    """The same for a model that looks both ways."""

    @property
    def pair_count(self) -> int:
        """How many pairs of positions attend: all of a text."""
        # The sum of 1 to n, twice, is n more than n squared.
        return 2 * super().pair_count - self.token_count


@dataclass(frozen=True)
class ExampleBatch(TensorBatch):
    """Inputs with what is learnt for each: an encoder's view of a batch."""

    tokens: torch.Tensor
    """Shape (rows, longest input)."""
    is_input: torch.Tensor
    """bool, of the same shape: what is no padding."""
    targets: torch.Tensor
    """Shape (rows, longest target): tokens or classes, `IGNORED` past a target's end."""

    @property
    def token_count(self) -> int:
        """How many positions are not padding."""
        return int(self.is_input.sum()) + self.target_count

    @property
    def pair_count(self) -> int:
        """How many pairs of positions attend: all of an input."""
        return int(self.is_input.sum(dim=1).square().sum())


def read_batch(shards: ShardSet, rows: np.ndarray, samples: np.ndarray | None = None) -> Batch:
    """Read rows as a batch, whatever samples of the run they are. Raises as `read_rows`."""
    return batch_of(read_rows(shards, rows))


def batch_of(stored: PackedRows) -> Batch:
    """Derive targets, positions and segment numbers of rows."""
    shape = stored.tokens.shape
    # Starts and ends of all segments, of rows laid end to end, and their numbers in their rows.
    counts = np.diff(stored.row_offsets)
    starts = np.repeat(np.arange(len(counts)) * shape[1], counts) + stored.segments["start"]
    ends = starts + stored.segments["length"]
    numbers = np.arange(len(starts)) - np.repeat(stored.row_offsets[:-1], counts)
    tokens = stored.tokens.astype(np.int64)
    targets = np.empty(shape, np.int64)
    # Over the ends of rows, too: a row's last place ends a segment or is padding, and is replaced
    # below.
    targets.reshape(-1)[:-1] = stored.tokens.reshape(-1)[1:]
    if stored.targets is not None:
        # A mark stands at the token itself, a target one place before the token that it names.
        is_given = np.append(stored.targets.reshape(-1)[1:] == 0, True)
        targets.reshape(-1)[is_given] = IGNORED
    # The last token of a segment must not predict the first one of the next.
    targets.reshape(-1)[ends - 1] = IGNORED
    # What lies between one segment's end and the next one's start is padding.
    bounds = np.append(np.column_stack((starts, ends)).ravel(), tokens.size)
    lengths = np.diff(bounds, prepend=0)
    labels = np.full(len(lengths), PADDING_SEGMENT, np.int32)
    labels[1::2] = numbers
    segments = np.repeat(labels, lengths).reshape(shape)
    positions = np.arange(tokens.size, dtype=np.int32).reshape(shape)
    positions -= np.repeat((bounds - lengths).astype(np.int32), lengths).reshape(shape)
    # Even entries are gaps between segments.
    if lengths[::2].any():
        padding = segments == PADDING_SEGMENT
        targets[padding], positions[padding] = IGNORED, 0
    return Batch(*map(torch.from_numpy, (tokens, targets, positions, segments)))


def read_rows(shards: ShardSet, rows: np.ndarray) -> PackedRows:
    """Rows as they are stored; raises DamagedArtifact where a token id lies outside the
    vocabulary."""
    stored = shards.read(rows)
    tokens = stored.tokens
    if tokens.size and int(tokens.max()) >= shards.stats.vocab_size:
        shard, row = shards.locate(int(rows[np.argmax(tokens.max(axis=1))]))
        raise DamagedArtifact(
            f"Row {row} of the shard {shard.name} holds token {int(tokens.max())}, outside the "
            f"vocabulary of {shards.stats.vocab_size}. Set the shards aside and make them again "
            f"with: llm-assets doctor --repair && {make_command('tokenized_shards')}"
        )
    return stored


def bytes_per_token(shards: ShardSet) -> float:
    """Bytes of cleaned text per token of this split; end tokens count as tokens."""
    size = tokens = 0
    for shard in shards.shards:
        documents = shard.documents(["bytes", "tokens"])
        size += pc.sum(documents["bytes"]).as_py()
        tokens += pc.sum(documents["tokens"]).as_py()
    return size / tokens


def read_examples(
    shards: ShardSet, rows: np.ndarray, samples: np.ndarray | None = None
) -> ExampleBatch:
    """Read rows of one example each; the batch is as wide as its longest input and target.

    It is the same for any samples. Raises as `read_rows`.
    """
    stored = read_rows(shards, rows)
    assert stored.targets is not None, "rows of examples are marked"
    tokens = stored.tokens.astype(np.int64)
    places = np.arange(tokens.shape[1])
    lengths = row_lengths(stored)
    is_target = (stored.targets > 0) & (places < lengths[:, None])
    targets = is_target.sum(axis=1)
    # The row of a forgotten example is empty, and a model that is shown no token at all answers
    # NaN.
    inputs = np.maximum(lengths - targets, 1)
    is_input = places[: inputs.max()] < inputs[:, None]
    target_places = places[: max(1, targets.max())]
    # Places past a row's end are read from its last column, and replaced below.
    columns = np.minimum(inputs[:, None] + target_places, tokens.shape[1] - 1)
    target_tokens = np.take_along_axis(tokens, columns, axis=1)
    target_tokens[target_places >= targets[:, None]] = IGNORED
    parts = (tokens[:, : inputs.max()], is_input, target_tokens)
    return ExampleBatch(*(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))


def row_lengths(rows: PackedRows) -> np.ndarray:
    """Tokens of the example in each row, int64 of shape (rows,); 0 where it is a forgotten one."""
    lengths = np.zeros(len(rows.tokens), np.int64)
    lengths[np.diff(rows.row_offsets) > 0] = rows.segments["length"]
    return lengths
