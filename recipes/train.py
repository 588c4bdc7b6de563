"""A training run brought to its end by the trainer of its recipe."""

from collections.abc import Callable
from pathlib import Path

from artifacts.program.lifetime import Interruption
from recipes.checkpointing.export import is_whole
from recipes.distributed.workers import Workers
from recipes.spec import TrainingResult, TrainingSpec, find_result
from recipes.training.trainer import Trainer
from recipes.tune.trainer import TuneTrainer

TRAINERS: dict[str, type[Trainer]] = {"torchtune": TuneTrainer}
"""Of the recipes whose steps are not our own engine's."""


def train(
    spec: TrainingSpec, workers: Workers, interruption: Interruption, report: Callable[[str], None]
) -> TrainingResult:
    """Bring a run to its end, from wherever it stands.

    Raises:
        UserError: the inputs do not fit together, or the run folder belongs to other settings.
        Interrupted: a signal came; everything is saved.
    """
    finished = find_result(Path(spec.run_folder), report)
    if finished and is_whole(Path(spec.export_folder)):
        report(f"The run {spec.run_id} is complete already: {finished.steps} steps.")
        return finished
    trainer = TRAINERS.get(spec.training.recipe, Trainer)(spec, workers, interruption, report)
    try:
        return trainer.finish()
    finally:
        trainer.close()
