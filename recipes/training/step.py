"""One optimizer step: forward, backward, clip, update."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipes.data.batch import Batch, ExampleBatch
from recipes.distributed.sharding import synchronise_gradients
from recipes.distributed.workers import Workers
from recipes.model.precision import mixed_precision
from recipes.optimization.optimizer import Optimizers, set_learning_rate
from recipes.sections import Precision


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
    model: nn.Module,
    optimizers: Optimizers,
    batches: Sequence[Batch | ExampleBatch],
    learning_rate: float,
    gradient_clip: float,
    largest_norm: float,
    precision: Precision,
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
        synchronise_gradients(model, batch is batches[-1])
        with mixed_precision(precision, workers.device):
            loss = model(batch.to(workers.device))
        # Sharded gradients are averaged over workers, hence the factor.
        (loss * (workers.dp_size / max(targets, 1.0))).backward()
        local_loss += loss.detach()
    gradient_norm = _clip(model, gradient_clip)
    (loss_sum,) = workers.sum(float(local_loss))
    finite = math.isfinite(gradient_norm) and math.isfinite(loss_sum)
    skipped = not finite or gradient_norm > largest_norm
    if not skipped:
        before_update()
        set_learning_rate(optimizers, learning_rate)
        for optimizer in optimizers:
            optimizer.step()
    model.zero_grad(set_to_none=True)
    compute_seconds = time.perf_counter() - began
    return StepOutcome(
        loss=loss_sum / max(targets, 1.0),
        gradient_norm=gradient_norm,
        tokens=int(tokens),
        targets=int(targets),
        compute_seconds=compute_seconds,
        skipped=skipped,
    )


def _clip(model: nn.Module, limit: float) -> float:
    """Scale the gradient down to a largest norm; returns the norm before."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
