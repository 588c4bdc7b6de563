"""The update of the weights: which gradients are usable, the optimizers, the learning rate."""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, TypeVar

import torch
from pydantic import BaseModel
from torch import nn

from recipes.device import device_of
from recipes.model.causal_model import TrainableModel
from recipes.sections import OptimizerSettings, ScheduleSettings

HISTORY = 64
ENOUGH_HISTORY = 16
"""With fewer norms their median says too little, and no finite gradient is too large."""


class GradientGuard(BaseModel):
    """Refuses gradients that are not finite or far above the recent ones; part of a checkpoint.

    A skipped step leaves the weights as they are. So if norms stay high over several skipped steps,
    it is not training that diverges but the text that has changed: they become the recent ones.
    Such gradients are clipped like all others.
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
        """Count a skipped step; returns what to tell of it, and whether it ends the training."""
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
        message = f"step {step} was skipped: {reason} ({len(self.skipped_steps)} skipped so far)"
        if len(self.high_norms) >= settings.accept_after_skips:
            self.recent_norms, self.high_norms = self.high_norms, []
            message += (
                f". WARNING: {settings.accept_after_skips} in a row are text of another kind: "
                f"norms around {self._typical():.3g} are used from here on"
            )
        return message, False

    def _typical(self) -> float:
        return median(self.recent_norms) if self.recent_norms else math.nan


Optimizers = Sequence[torch.optim.Optimizer]


def build_optimizers(model: TrainableModel, settings: OptimizerSettings) -> Optimizers:
    """AdamW over everything, or Muon over the layers' matrices and AdamW over the rest.

    Matrices decay; norms and biases do not. Muon (Jordan et al., 2024) takes AdamW's learning rate,
    its updates being scaled to the same size (Liu et al., 2025).
    """
    if settings.name == "adamw":
        return [adamw(model, settings)]
    in_layers = {id(p) for p in model.network.layers.parameters()}
    muon = [
        p
        for name, p in model.named_parameters()
        if p.requires_grad and p.ndim == 2 and id(p) in in_layers and _is_matrix(name, p)
    ]
    return [
        # Of matrices that are split over workers, DTensor gathers what its products need.
        torch.optim.Muon(
            muon,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        adamw(model, settings, without=muon),
    ]


AdamW = TypeVar("AdamW", bound=torch.optim.AdamW)


def adamw(
    model: nn.Module,
    settings: OptimizerSettings,
    kind: type[AdamW] = torch.optim.AdamW,
    without: Sequence[nn.Parameter] = (),
) -> AdamW:
    """AdamW, or a kind of it, under which matrices decay and norms and biases do not, for the
    parameters that no other optimizer trains."""
    others = set(map(id, without))
    trained = [
        (name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in others
    ]
    groups: list[dict[str, Any]] = [
        {
            "params": [p for name, p in trained if _is_matrix(name, p) == decays],
            "weight_decay": settings.weight_decay if decays else 0.0,
        }
        for decays in (True, False)
    ]
    return kind(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        **device_of(trained[0][1].device).adamw,
    )


def _is_matrix(name: str, parameter: nn.Parameter) -> bool:
    # The biases of a mixture's experts have two dimensions, too, of which one counts the experts.
    return parameter.ndim >= 2 and not name.endswith("bias")


def set_learning_rate(optimizers: Optimizers, learning_rate: float) -> None:
    """Give every group the learning rate of this step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate


def learning_rate_factor(schedule: ScheduleSettings, step: int, steps: int) -> float:
    """Share of the peak learning rate for the 1-based `step` of a run of `steps`.

    Warm-up rises linearly and reaches the peak at its end; the last step has
    `final_fraction`. The stable form is that of Hu et al., "MiniCPM" (2024).
    """
    warmup = schedule.warmup(steps)
    if step < warmup:
        return step / warmup
    # A warm-up that fills the run leaves its last step for the decay.
    first = min(warmup, max(steps - 1, 1))
    if schedule.shape == "warmup_stable_decay":
        # Not before the warm-up's end, where the rate would fall at once.
        first = max(first, steps - round(steps * schedule.decay_fraction))
    # Without steps to decay over, the peak is held.
    progress = min(max((step - first) / (steps - first), 0.0), 1.0) if steps > first else 0.0
    share = 0.5 * (1 + math.cos(math.pi * progress)) if schedule.shape == "cosine" else 1 - progress
    return schedule.final_fraction + (1 - schedule.final_fraction) * share
