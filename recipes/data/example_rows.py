"""Batches of rows that hold one example each: its input, then its target."""

import numpy as np
import torch

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
    lengths = stored.segments["length"].astype(np.int64)
    is_target = (stored.targets > 0) & (places < lengths[:, None])
    targets = is_target.sum(axis=1)
    inputs = lengths - targets
    is_input = places[: inputs.max()] < inputs[:, None]
    columns = np.minimum(inputs[:, None] + places[: targets.max()], tokens.shape[1] - 1)
    wanted = np.take_along_axis(tokens, columns, axis=1)
    wanted[places[: targets.max()] >= targets[:, None]] = IGNORED
    parts = (tokens[:, : inputs.max()], is_input, wanted)
    return ExampleBatch(*(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))
