"""How many optimizer steps a run takes."""

import math
from typing import NamedTuple

from artifacts.shards import ShardStats, Split
from recipes.settings import TrainingSettings


def total_steps(training: TrainingSettings, shards: ShardStats) -> int:
    """Steps of the whole run, from its budget in steps, tokens or passes over the train split.

    Replayed rows count as tokens, not as a pass.
    """
    if training.steps is not None:
        return training.steps
    train = _SplitSize.of(shards, "train")
    replay, share = _SplitSize.of(shards, "replay"), training.replay_share
    if training.epochs is not None:
        return math.ceil(training.epochs * train.rows / (training.global_batch_size * (1 - share)))
    assert training.tokens is not None, "the settings hold exactly one budget"
    tokens_per_row = (1 - share) * train.tokens_per_row + share * replay.tokens_per_row
    return math.ceil(training.tokens / (training.global_batch_size * tokens_per_row))


class _SplitSize(NamedTuple):
    rows: int
    tokens_per_row: float

    @classmethod
    def of(cls, shards: ShardStats, split: Split) -> "_SplitSize":
        entries = [shard for shard in shards.shards if shard.split == split]
        rows = sum(entry.rows for entry in entries)
        return cls(rows, sum(entry.tokens for entry in entries) / max(rows, 1))
