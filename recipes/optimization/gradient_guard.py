"""Which gradients are usable."""

import math
from statistics import median

from pydantic import BaseModel

HISTORY = 64
ENOUGH_HISTORY = 16


class GradientGuard(BaseModel):
    """Refuses gradients that are not finite or far above the recent ones; part of a checkpoint."""

    recent_norms: list[float] = []
    """Norms of the last accepted gradients, oldest first."""
    skipped_steps: list[int] = []
    """Steps skipped since the run's beginning: their rows taught the model nothing."""
    skipped_in_a_row: int = 0

    def largest_norm(self, factor: float) -> float:
        """The limit for the next gradient: `factor` times the recent median."""
        if len(self.recent_norms) < ENOUGH_HISTORY:
            return math.inf
        return factor * median(self.recent_norms)

    def accept(self, norm: float) -> None:
        """Remember a gradient that was used."""
        self.recent_norms = [*self.recent_norms, norm][-HISTORY:]
        self.skipped_in_a_row = 0

    def skip(self, step: int, norm: float, stop_after: int) -> tuple[str, bool]:
        """Count a skipped step; returns why, and whether too many were skipped in a row."""
        self.skipped_steps = [*self.skipped_steps, step]
        self.skipped_in_a_row += 1
        if math.isfinite(norm):
            reason = f"a gradient norm of {norm:.3g}, far above the recent {self._typical():.3g}"
        else:
            reason = "a gradient that is not finite"
        if self.skipped_in_a_row >= stop_after:
            return (
                f"Training stopped at step {step}: since step {step - self.skipped_in_a_row + 1} "
                f"every step had {reason}; the weights are those from before. Lower "
                "`checkpoint.optimizer.learning_rate`, or look at the rows it trained on "
                "(`checkpoint.logging.audit_rows`)."
            ), True
        skipped = len(self.skipped_steps)
        return f"step {step} was skipped: {reason} ({skipped} skipped so far)", False

    def _typical(self) -> float:
        return median(self.recent_norms) if self.recent_norms else math.nan
