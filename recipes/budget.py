"""How many optimizer steps a run takes."""

import math

from artifacts.shards import ShardStats
from recipes.settings import TrainingSettings


def total_steps(training: TrainingSettings, shards: ShardStats) -> int:
    """Steps of the whole run, from its budget in steps, tokens or passes over the train split."""
    if training.steps is not None:
        return training.steps
    train = [shard for shard in shards.shards if shard.split == "train"]
    rows = sum(shard.rows for shard in train)
    if training.epochs is not None:
        return math.ceil(training.epochs * rows / training.global_batch_size)
    assert training.tokens is not None, "the settings hold exactly one budget"
    tokens_per_row = sum(shard.tokens for shard in train) / max(rows, 1)
    return math.ceil(training.tokens / (training.global_batch_size * tokens_per_row))
