"""A batch of packed rows, as the model takes it."""

from dataclasses import dataclass
from typing import Self

import torch

IGNORED = -100
"""Target of a position that has nothing to predict: the end of a segment, or padding."""
PADDING_SEGMENT = -1


@dataclass(frozen=True)
class Batch:
    """Rows ready for the model; every tensor has the shape (rows, sequence_length)."""

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
        tensors = (self.tokens, self.targets, self.positions, self.segments)
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in tensors))


@dataclass(frozen=True)
class ExampleBatch:
    """Inputs with what is learnt for each: an encoder's view of a batch."""

    tokens: torch.Tensor
    """Shape (rows, longest input)."""
    is_input: torch.Tensor
    """bool, of the same shape: what is no padding."""
    targets: torch.Tensor
    """Shape (rows, longest target): tokens or classes, `IGNORED` past a target's end."""

    @property
    def target_count(self) -> int:
        """How many targets there are."""
        return int((self.targets != IGNORED).sum())

    @property
    def token_count(self) -> int:
        """How many positions are not padding."""
        return int(self.is_input.sum()) + self.target_count

    def to(self, device: torch.device) -> Self:
        """The same batch on another device."""
        tensors = (self.tokens, self.is_input, self.targets)
        return type(self)(*(tensor.to(device, non_blocking=True) for tensor in tensors))
