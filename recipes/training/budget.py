"""How many optimizer steps a run takes."""

import math
from typing import NamedTuple

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats, Split
from recipes.settings.training import TrainingSettings


def total_steps(
    training: TrainingSettings, shards: ShardStats, unseen_rows: int | None = None
) -> int:
    """Steps of the whole run, from its budget in steps, tokens or passes over the train split.

    Replayed rows count as tokens, not as a pass. A run that continues from a model passes over what
    that has not seen; the rows that it sees again come on top.

    Args:
        unseen_rows: train rows that the run's start has not seen, where that is known; with none
            left, a pass is one over the whole split.

    Raises:
        UserError: the budget is less than one step, or the warm-up is longer than the run.
    """
    steps = _steps(training, shards, unseen_rows)
    warmup = training.schedule.warmup(steps)
    if warmup > steps:
        raise UserError(
            f"`checkpoint.schedule.warmup_steps` is {warmup}, but the run has {steps} steps. "
            "Shorten it, or lengthen `checkpoint.budget`."
        )
    return steps


def _steps(training: TrainingSettings, shards: ShardStats, unseen_rows: int | None) -> int:
    budget = training.budget
    if budget.steps is not None:
        return budget.steps
    train = _SplitSize.of(shards, "train")
    replay, share = _SplitSize.of(shards, "replay"), training.replay_share
    if budget.epochs is not None:
        new_rows: float = train.rows
        if unseen_rows and unseen_rows < train.rows:
            new_rows = unseen_rows / (1 - training.order.seen_share)
        return math.ceil(budget.epochs * new_rows / (budget.global_batch_size * (1 - share)))
    assert budget.tokens is not None, "the settings hold exactly one budget"
    tokens_per_row = (1 - share) * train.tokens_per_row + share * replay.tokens_per_row
    tokens_per_step = budget.global_batch_size * tokens_per_row
    if budget.tokens < tokens_per_step:
        raise UserError(
            f"`checkpoint.budget.tokens` is {budget.tokens:,}, less than the "
            f"{tokens_per_step:,.0f} of a single step. Raise it, or lower "
            "`checkpoint.budget.global_batch_size`."
        )
    return math.ceil(budget.tokens / tokens_per_step)


class _SplitSize(NamedTuple):
    rows: int
    tokens_per_row: float

    @classmethod
    def of(cls, shards: ShardStats, split: Split) -> "_SplitSize":
        entries = [shard for shard in shards.shards if shard.split == split]
        rows = sum(entry.rows for entry in entries)
        return cls(rows, sum(entry.tokens for entry in entries) / max(rows, 1))
