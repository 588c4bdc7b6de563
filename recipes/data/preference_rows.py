"""Batches of prompts, each with the better and the worse of two answers."""

from dataclasses import dataclass

import numpy as np
import torch

from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import IGNORED, ExampleBatch
from recipes.data.example_rows import row_lengths
from recipes.data.packed_rows import check_vocabulary


@dataclass(frozen=True)
class PreferenceBatch(ExampleBatch):
    """The conversations that end with the chosen answers, then those with the rejected ones.

    Every tensor has the shape (2 * examples, longest conversation). The targets are the answers'
    tokens at their own places, `IGNORED` elsewhere.
    """

    @property
    def target_count(self) -> int:
        """How many examples there are, forgotten ones aside."""
        return int(self.is_example.sum())

    @property
    def token_count(self) -> int:
        """How many positions are not padding."""
        return int(self.is_input.sum())

    @property
    def is_example(self) -> torch.Tensor:
        """bool, shape (examples,): which have answers; those of forgotten texts have none."""
        return (self.targets != IGNORED).any(dim=1)[: len(self.targets) // 2]


def read_preferences(
    shards: ShardSet, rows: np.ndarray, samples: np.ndarray | None = None
) -> PreferenceBatch:
    """Read rows of one example each; it is the same for any samples.

    Raises:
        DamagedArtifact: a token id lies outside the shards' vocabulary.
    """
    stored = shards.read(rows)
    assert stored.targets is not None, "rows of examples are marked"
    check_vocabulary(shards, rows, stored.tokens)
    return lay_out(stored.tokens.astype(np.int64), stored.targets > 0, row_lengths(stored))


def lay_out(tokens: np.ndarray, is_answer: np.ndarray, lengths: np.ndarray) -> PreferenceBatch:
    """A batch of examples as they are stored: both conversations in one row.

    Args:
        tokens: int64, shape (examples, width).
        is_answer: bool, of the same shape.
        lengths: int64, shape (examples,); what is past it is padding.
    """
    count, width = tokens.shape
    is_answer = is_answer & (np.arange(width) < lengths[:, None])
    # The chosen answer is the first stretch of marks, and its conversation ends with it.
    followed = np.pad(is_answer[:, 1:], ((0, 0), (0, 1)))
    middle = np.minimum(np.argmax(is_answer & ~followed, axis=1) + 1, lengths)
    starts = np.concatenate([np.zeros_like(middle), middle])
    sizes = np.concatenate([middle, lengths - middle])
    places = np.arange(max(1, sizes.max()))
    is_input = places < sizes[:, None]
    rows = np.tile(np.arange(count), 2)[:, None]
    columns = np.minimum(starts[:, None] + places, width - 1)
    laid_out = np.where(is_input, tokens[rows, columns], 0)
    targets = np.where(is_input & is_answer[rows, columns], laid_out, IGNORED)
    return PreferenceBatch(*map(torch.from_numpy, (laid_out, is_input, targets)))
