"""One optimizer step: forward, backward, clip, update."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from recipes.data.batch import Batch, ExampleBatch
from recipes.distributed.strategy import Strategy
from recipes.distributed.workers import Workers


@dataclass(frozen=True)
class StepOutcome:
    """What one step did, over all workers."""

    loss: float
    """Mean over the step's targets, in nats."""
    gradient_norm: float
    """Before clipping."""
    tokens: int
    """Positions that are not padding."""
    targets: int
    """Positions that entered the loss."""
    compute_seconds: float
    """Wall time of forward, backward, clipping and update."""
    skipped: bool
    """True where the gradient was not fit to be used and the weights were left as they were."""


def train_step(
    strategy: Strategy,
    batches: Sequence[Batch | ExampleBatch],
    learning_rate: float,
    largest_norm: float,
    workers: Workers,
    before_update: Callable[[], None],
) -> StepOutcome:
    """Accumulate the gradient of this worker's batches and update the weights.

    The loss is the mean over all targets of the global batch, whatever number of workers and
    accumulation steps it is spread over. A gradient that is not finite, or whose norm is above
    `largest_norm`, is dropped. `before_update` is called when weights are about to change.
    """
    tokens, targets = workers.sum(
        sum(batch.token_count for batch in batches), sum(batch.target_count for batch in batches)
    )
    began = time.perf_counter()
    local_loss = torch.zeros((), device=workers.device)
    for batch in batches:
        loss = strategy.loss(batch)
        # Gradients are averaged over workers, hence the factor.
        strategy.backward(loss * (workers.dp_size / max(targets, 1.0)), batch is batches[-1])
        local_loss += loss.detach()
    (loss_sum,) = workers.sum(float(local_loss))
    update = strategy.update(learning_rate, largest_norm, math.isfinite(loss_sum), before_update)
    return StepOutcome(
        loss=loss_sum / max(targets, 1.0),
        gradient_norm=update.gradient_norm,
        tokens=int(tokens),
        targets=int(targets),
        compute_seconds=time.perf_counter() - began,
        skipped=update.skipped,
    )
