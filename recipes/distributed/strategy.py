"""The interface of every way to spread a model over workers; FSDP2; one optimizer step."""

import functools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, state_dict
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from recipes.data.batch import Batch, ExampleBatch
from recipes.device import mixed_precision
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.optimization import Optimizers, set_learning_rate
from recipes.settings import Precision


class UpdateRule(NamedTuple):
    """What an update of the weights goes by."""

    learning_rate: float
    largest_norm: float
    """A gradient above it is not used, and neither is one that is not finite."""
    is_finite: Callable[[], bool]
    """Whether the step's loss is; otherwise its gradient is not used. Call it only after starting
    all work that does not need the answer, since it waits for the device."""
    before_update: Callable[[], None]
    """Called when weights are about to change."""


class Update(NamedTuple):
    """What became of one step's gradient."""

    gradient_norm: float
    """Over all workers, before clipping; not finite where the gradient is not."""
    skipped: bool
    """True where the weights were left as they were."""


class Strategy(ABC):
    """A model and its optimizer, spread over the workers; each of them calls every method."""

    name: ClassVar[str]
    marker: ClassVar[str]
    """The file by which its training state on disk is recognized."""
    saves_in_background: ClassVar[bool] = True
    """Whether training may go on while a copy of its tensors is written."""
    model: TrainableModel

    @abstractmethod
    def loss(self, batch: Batch | ExampleBatch) -> torch.Tensor:
        """The loss of this worker's batch in nats, summed over targets, in the run's precision.

        Where several workers compute the same rows, the loss is the mean of what they return.
        """

    def accumulate(self, batches: Sequence[Batch | ExampleBatch], scale: float) -> torch.Tensor:
        """Accumulate the gradient of a step's batches, `scale` times that of their losses' sum,
        which is returned."""
        losses = []
        for batch in batches:
            loss = self.loss(batch)
            self.backward(loss * scale, batch is batches[-1])
            losses.append(loss.detach())
        return functools.reduce(torch.add, losses)

    @abstractmethod
    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Add a loss's gradient, averaged over workers, to that of the step's batches so far; no
        other follows the last."""

    @abstractmethod
    def update(self, rule: UpdateRule) -> Update:
        """Clip the step's gradient, change the weights by it, and forget it."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight and buffer by name, whole, in float32 on the host, one after another.

        All workers take all of them, as each is gathered from all; none has to keep one.
        """

    @abstractmethod
    def tensors(self) -> dict[str, Any]:
        """This worker's part of the training state, in tensors that steps change in place."""

    @abstractmethod
    def write(self, url: str, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        """Write the training state, of `tensors` or a copy, into an empty folder.

        The group is for messages of a save in the background. Raises OSError on every worker where
        storage failed, so that they may try again together.
        """

    @abstractmethod
    def read(self, url: str) -> None:
        """Go on from the training state in a folder, which any number of workers may have written;
        raises UserError where it cannot be used as these workers are placed."""


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
    pairs: int
    """Positions that look at one another, each with itself."""
    compute_seconds: float
    """Wall time of forward, backward, clipping and update."""
    skipped: bool
    """True where the gradient was not fit to be used and the weights were left as they were."""


def count_positions(
    batches: Sequence[Batch | ExampleBatch], workers: Workers
) -> tuple[int, int, int]:
    """Tokens, targets and pairs of a step, as in `StepOutcome`, over all workers."""
    tokens, targets, pairs = workers.sum(
        sum(batch.token_count for batch in batches),
        sum(batch.target_count for batch in batches),
        sum(batch.pair_count for batch in batches),
    )
    return int(tokens), int(targets), int(pairs)


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
    tokens, targets, pairs = count_positions(batches, workers)
    began = time.perf_counter()
    # Gradients are averaged over workers, hence the factor. A step has no targets where all of its
    # texts are forgotten.
    local_loss = strategy.accumulate(batches, workers.dp_size / max(targets, 1))

    # Once a step, as each call would be a message between all workers.
    @functools.cache
    def loss_sum() -> float:
        return workers.sum(float(local_loss))[0]

    update = strategy.update(
        UpdateRule(learning_rate, largest_norm, lambda: math.isfinite(loss_sum()), before_update)
    )
    return StepOutcome(
        loss=loss_sum() / max(targets, 1),
        gradient_norm=update.gradient_norm,
        tokens=tokens,
        targets=targets,
        pairs=pairs,
        compute_seconds=time.perf_counter() - began,
        skipped=update.skipped,
    )


# Frozen weights are the base model's, which the run's inputs pin.
TRAINED_ONLY = state_dict.StateDictOptions(ignore_frozen_params=True)
PARTIAL = state_dict.StateDictOptions(strict=False)
FORMS = {"fused", "foreach", "capturable"}
"""Settings of torch's optimizers that change how a step is computed, not what it comes to."""


class FullySharded(Strategy):
    """A model that `sharding` has spread over the workers."""

    name = "FSDP2"
    marker = ".metadata"

    def __init__(
        self,
        model: TrainableModel,
        optimizers: Optimizers,
        gradient_clip: float,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self.model, self._optimizers = model, optimizers
        self._gradient_clip, self._precision, self._device = gradient_clip, precision, device

    def loss(self, batch: Batch | ExampleBatch) -> torch.Tensor:
        with mixed_precision(self._precision, self._device):
            loss: torch.Tensor = self.model(batch.to(self._device))
        return loss

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        if isinstance(self.model, FSDPModule):
            # Workers exchange gradients once a step, with its last batch.
            self.model.set_requires_gradient_sync(is_last)
        loss.backward()

    def update(self, rule: UpdateRule) -> Update:
        total_norm = self._clip()
        # The host decides, not the `found_inf` of fused AdamW: it also goes by the norms of earlier
        # steps. It waits for the device here, once a step.
        has_loss, norm = rule.is_finite(), float(total_norm)
        skipped = not has_loss or not math.isfinite(norm) or norm > rule.largest_norm
        if not skipped:
            rule.before_update()
            set_learning_rate(self._optimizers, rule.learning_rate)
            for optimizer in self._optimizers:
                optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return Update(norm, skipped)

    def _clip(self) -> torch.Tensor:
        """The gradient's norm over all workers, before it is clipped."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._gradient_clip)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in state_dict.get_model_state_dict(self.model).items():
            weight = value.full_tensor() if isinstance(value, DTensor) else value
            yield name, weight.detach().cpu()

    def tensors(self) -> dict[str, Any]:
        # A state that lacks that of some weights, such as those that no gradient has reached, could
        # not be read.
        self._begin_optimizers()
        return {
            "model": state_dict.get_model_state_dict(self.model, options=TRAINED_ONLY),
            "optimizer": state_dict.get_optimizer_state_dict(self.model, self._optimizers),
        }

    def _begin_optimizers(self) -> None:
        """Create the optimizer state of weights that have taken no step, because the first step was
        skipped or no gradient reaches them.

        A step with learning rate 0 creates it; that step must not be counted.
        """
        for optimizer in self._optimizers:
            groups = optimizer.param_groups
            parameters = [p for group in groups for p in group["params"] if p.requires_grad]
            fresh = [p for p in parameters if p not in optimizer.state]
            if not fresh:
                continue
            for parameter in fresh:
                parameter.grad = torch.zeros_like(parameter)
            rates = [group["lr"] for group in groups]
            set_learning_rate([optimizer], 0.0)
            optimizer.step()
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
            for parameter in fresh:
                parameter.grad = None
                if "step" in optimizer.state[parameter]:
                    optimizer.state[parameter]["step"].zero_()

    def write(self, url: str, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        writer = FsspecWriter(url) if "://" in url else FileSystemWriter(url)
        dcp.save(tensors, storage_writer=writer, process_group=group)

    def read(self, url: str) -> None:
        tensors = self._read_into()
        groups = tensors["optimizer"]["param_groups"]
        forms = [{name: group[name] for name in FORMS & group.keys()} for group in groups]
        reader = FsspecReader(url) if "://" in url else FileSystemReader(url)
        dcp.load(tensors, storage_reader=reader)
        # The form in which steps are computed follows this hardware, not the one that wrote the
        # state.
        for group, form in zip(groups, forms, strict=True):
            group |= form
        state_dict.set_model_state_dict(self.model, tensors["model"], options=PARTIAL)
        state_dict.set_optimizer_state_dict(self.model, self._optimizers, tensors["optimizer"])

    def _read_into(self) -> dict[str, Any]:
        """Tensors that a training state is read into."""
        return self.tensors()
