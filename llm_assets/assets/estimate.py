"""What the training will take and cost, said before it starts."""

from artifacts.shards.format import ShardStats
from artifacts.store.store import Artifact
from llm_assets.runners.training import TrainingRunner
from recipes.training.budget import total_steps
from recipes.training_settings import TrainingSettings


def training_estimate(
    training: TrainingRunner, settings: TrainingSettings, shards: Artifact, base: Artifact
) -> str | None:
    """Such as `checkpoint: about 2.3 h, 9.70 USD`; None where the runner costs nothing."""
    stats = ShardStats.model_validate(shards.stats)
    rows = total_steps(settings, stats) * settings.budget.global_batch_size
    return training.estimate(rows * stats.sequence_length, base.stats["parameters"])
