"""Which gradients are usable."""

import math
from statistics import median

from pydantic import BaseModel

from recipes.settings.sections import OptimizerSettings

HISTORY = 64
ENOUGH_HISTORY = 16


class GradientGuard(BaseModel):
    """Refuses gradients that are not finite or far above the recent ones; part of a checkpoint.

    A skipped step leaves the weights as they are, so norms that stay high over several of them are
    no training that runs away, but text of another kind: they are the recent ones from there on.
    Such gradients are clipped as all are.
    """

    recent_norms: list[float] = []
    """Norms of the last accepted gradients, oldest first."""
    skipped_steps: list[int] = []
    """Steps skipped since the run's beginning: their rows taught the model nothing."""
    skipped_in_a_row: int = 0
    high_norms: list[float] = []
    """The finite ones of the steps skipped in a row."""

    def largest_norm(self, factor: float) -> float:
        """The limit for the next gradient: `factor` times the recent median."""
        if len(self.recent_norms) < ENOUGH_HISTORY:
            return math.inf
        return factor * median(self.recent_norms)

    def accept(self, norm: float) -> None:
        """Remember a gradient that was used."""
        self.recent_norms = [*self.recent_norms, norm][-HISTORY:]
        self.skipped_in_a_row, self.high_norms = 0, []

    def skip(self, step: int, norm: float, settings: OptimizerSettings) -> tuple[str, bool]:
        """Count a skipped step.

        Returns:
            What to tell of it, and whether it ends the training.
        """
        self.skipped_steps = [*self.skipped_steps, step]
        self.skipped_in_a_row += 1
        reason = "a gradient that is not finite"
        if math.isfinite(norm):
            self.high_norms = [*self.high_norms, norm]
            reason = f"a gradient norm of {norm:.3g}, far above the recent {self._typical():.3g}"
        if self.skipped_in_a_row >= settings.stop_after_skips:
            first = step - self.skipped_in_a_row + 1
            return (
                f"Training stopped at step {step}: no step since {first} had a usable gradient, "
                f"the last one {reason}; the weights are those from before. Lower "
                "`checkpoint.optimizer.learning_rate`, or look at the rows it trained on "
                "(`checkpoint.logging.audit_rows`)."
            ), True
        told = f"step {step} was skipped: {reason} ({len(self.skipped_steps)} skipped so far)"
        if len(self.high_norms) >= settings.accept_after_skips:
            self.recent_norms, self.high_norms = self.high_norms, []
            told += (
                f". WARNING: {settings.accept_after_skips} in a row are text of another kind: "
                f"norms around {self._typical():.3g} are used from here on"
            )
        return told, False

    def _typical(self) -> float:
        return median(self.recent_norms) if self.recent_norms else math.nan
