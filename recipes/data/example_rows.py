"""Batches of rows that hold one example each: its input, then its target."""

import numpy as np
import torch

from artifacts.shards.format import PackedRows
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import IGNORED, ExampleBatch
from recipes.data.packed_rows import check_vocabulary


def read_examples(
    shards: ShardSet, rows: np.ndarray, samples: np.ndarray | None = None
) -> ExampleBatch:
    """Read rows of one example each; the batch is as wide as its longest input and target.

    It is the same for any samples.

    Raises:
        DamagedArtifact: a token id lies outside the shards' vocabulary.
    """
    stored = shards.read(rows)
    assert stored.targets is not None, "rows of examples are marked"
    check_vocabulary(shards, rows, stored.tokens)
    tokens = stored.tokens.astype(np.int64)
    places = np.arange(tokens.shape[1])
    lengths = row_lengths(stored)
    is_target = (stored.targets > 0) & (places < lengths[:, None])
    targets = is_target.sum(axis=1)
    # A model that is shown nothing at all answers with no number.
    inputs = np.maximum(lengths - targets, 1)
    is_input = places[: inputs.max()] < inputs[:, None]
    target_places = places[: max(1, targets.max())]
    columns = np.minimum(inputs[:, None] + target_places, tokens.shape[1] - 1)
    wanted = np.take_along_axis(tokens, columns, axis=1)
    wanted[target_places >= targets[:, None]] = IGNORED
    parts = (tokens[:, : inputs.max()], is_input, wanted)
    return ExampleBatch(*(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))


def row_lengths(rows: PackedRows) -> np.ndarray:
    """Tokens of the example in each row, int64 of shape (rows,); 0 where it is a forgotten one."""
    lengths = np.zeros(len(rows.tokens), np.int64)
    lengths[np.diff(rows.row_offsets) > 0] = rows.segments["length"]
    return lengths
