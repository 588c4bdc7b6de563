"""What a training will take and cost, said before it starts, and what it took."""

from collections.abc import Mapping
from typing import Any

from artifacts.shards.format import ShardStats
from artifacts.store.store import Artifact
from llm_assets.runners.training import TrainingRunner
from recipes.settings.training import TrainingSettings
from recipes.training.budget import total_steps


def training_estimate(
    training: TrainingRunner, settings: TrainingSettings, shards: Artifact, base: Artifact
) -> str | None:
    """Such as `checkpoint: about 2.3 h, 9.70 USD`; None where the runner costs nothing."""
    stats = ShardStats.model_validate(shards.stats)
    rows = total_steps(settings, stats) * settings.budget.global_batch_size
    return training.estimate(rows * stats.sequence_length, base.stats["parameters"])


def training_cost(stats: Mapping[str, Any], cost_per_hour: float | None) -> dict[str, float]:
    """Seconds that a checkpoint's training took and, where an hour has a price, the cost of them.

    Args:
        stats: of the `checkpoint` artifact.
        cost_per_hour: `automation.cost_per_hour`.
    """
    seconds = stats["tokens_seen"] / stats["tokens_per_second"]
    found = {"training_seconds": seconds}
    return found if cost_per_hour is None else found | {"cost": seconds / 3600 * cost_per_hour}
