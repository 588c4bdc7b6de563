"""Where training stands: the small state in a checkpoint, and what is said at the end."""

import math
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel

from artifacts.errors import UserError
from recipes.optimization import GradientGuard
from recipes.spec import METRICS_NAME, TrainingResult

RECENT_STEPS = 64


class TrainState(BaseModel):
    """The small state that a checkpoint keeps beside the tensors; every number in it is finite."""

    samples_seen: int = 0
    tokens_seen: int = 0
    guard: GradientGuard = GradientGuard()
    validation: dict[int, float] = {}
    """Step to result; step 0 is the base model."""
    last_loss: float | None = None
    """Of the last step that was not skipped."""
    recent_tokens_per_second: list[float] = []
    """Of the last steps, oldest first."""
    diverged: str | None = None
    """Why training ends before its last step; never in a checkpoint."""

    def add_step(self, loss: float, tokens_per_second: float) -> None:
        """Remember what a step that was not skipped came to."""
        self.last_loss = loss
        recent = [*self.recent_tokens_per_second, tokens_per_second]
        self.recent_tokens_per_second = recent[-RECENT_STEPS:]

    def add_validation(self, step: int, value: float) -> None:
        """Remember a validation; one that is not a number ends the training.

        Raises:
            UserError: the starting model's is not a number.
        """
        if not math.isfinite(value):
            if not self.validation:
                raise UserError(
                    "The starting model's loss on the validation text is not a number. Its weights "
                    "are damaged, or too large for `checkpoint.precision`: try float32, or another "
                    "`base_model`."
                )
            self.diverged = (
                f"Training stopped at step {step}: the loss on the validation text is no number "
                f"since some step after {max(self.validation)}. Every checkpoint that was saved "
                "can be loaded. Lower `checkpoint.optimizer.learning_rate`, or set "
                "`checkpoint.precision: float32`."
            )
            return
        self.validation[step] = value

    @property
    def best_step(self) -> int:
        """The step with the best validation since training began; 0 before the first."""
        found = self.validation
        trained = {step: bits for step, bits in found.items() if step} or found
        return min(trained, key=lambda step: (trained[step], step), default=0)

    def result(self, step: int, run_folder: Path, **run: Any) -> TrainingResult:
        """What `result.json` says after the last step.

        Args:
            run: the fields of the result that no state has, by name.
        """
        validation, best = self.validation, self.best_step
        return TrainingResult(
            steps=step,
            tokens_seen=self.tokens_seen,
            samples_seen=self.samples_seen,
            validation={
                "start": validation[0],
                "end": validation[max(validation)],
                "best": validation[best],
            },
            best_step=best,
            tokens_per_second=median(self.recent_tokens_per_second or [0.0]),
            final_loss=self.last_loss,
            skipped_steps=len(self.guard.skipped_steps),
            diverged=self.diverged,
            metrics_path=str(run_folder / METRICS_NAME),
            **run,
        )
