"""What a recipe consists of beside its settings; everything else is the same for all."""

from collections.abc import Callable
from dataclasses import dataclass

from recipes.data.batch import read_batch
from recipes.data.reader import ReadBatch
from recipes.evaluation.results import Scorer
from recipes.model.causal_model import TrainableModel
from recipes.spec import TrainingSpec


@dataclass(frozen=True)
class Objective:
    """What a recipe brings; order, steps, checkpoints, export, evaluation and serving are built on
    it.

    A model's forward takes a batch and gives the loss in nats, summed over the batch's targets, so
    that any number of workers and of accumulation steps gives the same step.
    """

    load: Callable[[TrainingSpec], TrainableModel]
    """The model to train, with float32 weights; raises UserError for one of another family."""
    read_batch: ReadBatch = read_batch
    """Rows of the shards as the model's forward takes them."""
    check: Callable[[TrainableModel, TrainingSpec], None] | None = None
    """Raises UserError where the model, on its device, cannot be trained on these rows."""
    scorer: Scorer | None = None
    """Scores held-out examples one by one, and says which metric decides; without one, models are
    measured by the bits that they need for held-out text, or for the answers in it."""
    trainer: str = "recipes.training.trainer:Trainer"
    """Which trainer: another one where the steps are not our own engine's."""
