"""What a finished run leaves on record of the text that it was trained on."""

from pathlib import Path

import numpy as np

from artifacts.shards.shard_set import ShardSet
from recipes.checkpointing.train_state import TrainState
from recipes.data.order import DataOrder
from recipes.data.seen import SEEN_NAME, Rows, Seen, look_up, record_seen
from recipes.data.trained import TRAINED_NAME, record_trained
from recipes.distributed.workers import Workers
from recipes.spec import TrainingSpec


def look_up_known(spec: TrainingSpec, workers: Workers) -> Rows:
    """What a run's start has seen of the train rows; each worker reads a part of the shards."""
    shards = ShardSet(spec.shards_folder, spec.shards, "train")
    found = look_up(shards, Seen.read(spec.seen), workers.rank, workers.count)
    return Rows(*map(workers.sum_parts, found))


def record_text(
    spec: TrainingSpec,
    known: Rows,
    order: DataOrder,
    state: TrainState,
    last_step: int,
    is_rank_zero: bool,
) -> tuple[float, int]:
    """Write `seen.parquet` and `trained.parquet` into the run folder.

    Args:
        known: of `look_up_known`.
        last_step: the step whose weights are exported.
        is_rank_zero: whether this worker writes them.

    Returns:
        As `record_seen`.
    """
    folder = Path(spec.run_folder)
    if is_rank_zero:
        size = spec.training.budget.global_batch_size
        steps = 1 + np.arange(last_step * size) // size
        taught = ~np.isin(steps, state.guard.skipped_steps)
        shards = ShardSet(spec.shards_folder, spec.shards, *order.splits)
        rows = order.rows(0, len(steps))[taught]
        path = str(folder / TRAINED_NAME)
        record_trained(shards, rows, steps[taught], path, spec.hidden)
    seen_path = str(folder / SEEN_NAME) if is_rank_zero else None
    return record_seen(
        ShardSet(spec.shards_folder, spec.shards, "train"),
        known,
        Seen.read(spec.seen if is_rank_zero else None),
        order.rows(0, state.samples_seen),
        seen_path,
        spec.hidden,
    )
