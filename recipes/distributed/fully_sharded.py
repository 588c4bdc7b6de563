"""FSDP2, or one worker alone: PyTorch's own optimizers, the training state through PyTorch DCP."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import (
    FileSystemReader,
    FileSystemWriter,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from recipes.data.batch import Batch, ExampleBatch
from recipes.device import mixed_precision
from recipes.distributed.strategy import Strategy, Update
from recipes.model.causal_model import TrainableModel
from recipes.optimization.optimizer import Optimizers, set_learning_rate
from recipes.settings.sections import Precision

# Frozen weights are the base model's, which the run's inputs pin.
TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True)
PARTIAL = StateDictOptions(strict=False)
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
FORMS = {"fused", "foreach", "capturable"}
"""Settings of torch's optimizers that change how a step is computed, not what it comes to."""


class FullySharded(Strategy):
    """A model that `recipes.distributed.sharding` has spread over the workers."""

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
            self.model.set_requires_gradient_sync(is_last)
        loss.backward()

    def update(
        self,
        learning_rate: float,
        largest_norm: float,
        is_finite: bool,
        before_update: Callable[[], None],
    ) -> Update:
        found = nn.utils.clip_grad_norm_(self.model.parameters(), self._gradient_clip)
        norm = float(found.full_tensor() if isinstance(found, DTensor) else found)
        skipped = not is_finite or not math.isfinite(norm) or norm > largest_norm
        if not skipped:
            before_update()
            set_learning_rate(self._optimizers, learning_rate)
            for optimizer in self._optimizers:
                optimizer.step()
        self.model.zero_grad(set_to_none=True)
        return Update(norm, skipped)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = get_model_state_dict(self.model, options=WHOLE)
        return weights

    def tensors(self) -> dict[str, Any]:
        self._begin_optimizers()
        return {
            "model": get_model_state_dict(self.model, options=TRAINED_ONLY),
            "optimizer": get_optimizer_state_dict(self.model, self._optimizers),
        }

    def _begin_optimizers(self) -> None:
        """Have the state of optimizers that took no step yet, as after a first step was skipped.

        torch makes it by a step without gradients, which is not to be counted.
        """
        if fresh := [optimizer for optimizer in self._optimizers if not optimizer.state]:
            get_optimizer_state_dict(self.model, fresh)
        for state in (state for optimizer in fresh for state in optimizer.state.values()):
            if "step" in state:
                state["step"].zero_()

    def write(self, url: str, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        with _alone_is_meant():
            dcp.save(tensors, storage_writer=_writer(url), process_group=group)

    def read(self, url: str) -> None:
        tensors = self._read_into()
        groups = tensors["optimizer"]["param_groups"]
        forms = [{name: group[name] for name in FORMS & group.keys()} for group in groups]
        with _alone_is_meant():
            dcp.load(tensors, storage_reader=_reader(url))
            # In which form steps are taken is up to this hardware, not to what wrote the state.
            for group, form in zip(groups, forms, strict=True):
                group |= form
            set_model_state_dict(self.model, tensors["model"], options=PARTIAL)
            set_optimizer_state_dict(self.model, self._optimizers, tensors["optimizer"])

    def _read_into(self) -> dict[str, Any]:
        """Tensors that a training state is read into."""
        return self.tensors()


def _writer(url: str) -> StorageWriter:
    return FsspecWriter(url) if "://" in url else FileSystemWriter(url)


def _reader(url: str) -> StorageReader:
    return FsspecReader(url) if "://" in url else FileSystemReader(url)


@contextmanager
def _alone_is_meant() -> Iterator[None]:
    """DCP remarks on every call that one process alone is saving."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"torch\.distributed")
        yield
