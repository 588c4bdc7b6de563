"""Parameters, moments and rows spread over the chips of a TPU, as FSDP2 does over processes.

One process writes down the program of a step for tensors as a whole, and XLA divides it by how they
are laid out (GSPMD: Xu et al., 2021). Files are those of FSDP2, so a run goes on on other hardware.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
from torch import nn
from torch.utils._pytree import tree_map_only
from torch_xla.distributed import spmd

from artifacts.errors import UserError
from recipes.data.batch import Batch, ExampleBatch
from recipes.distributed.strategy import FullySharded, Update, UpdateRule
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.optimization import adamw
from recipes.sections import OptimizerSettings
from recipes.settings import Precision
from recipes.spec import TrainingSpec
from recipes.tpu.device import in_few_shapes

AXIS = "chips"
Layout = tuple[str | None, ...]


class Xla(FullySharded):
    """A model on all chips of one machine."""

    # Its files are those of FSDP2, so each goes on from a training state of the other.
    name = "FSDP2"
    saves_in_background = False

    def __init__(
        self,
        model: TrainableModel,
        settings: OptimizerSettings,
        precision: Precision,
        workers: Workers,
        longest: int,
    ) -> None:
        """Move a model to the chips in place, for rows of at most `longest` tokens; raises
        UserError where it computes what XLA cannot compile once for all batches."""
        _check_shapes(model)
        self._chips, self._longest = workers.chips, longest
        self._mesh = spmd.Mesh(np.arange(workers.chips), (workers.chips,), (AXIS,))
        _move(model, workers.device)
        for parameter in model.parameters():
            self._lay_out(parameter)
        super().__init__(
            model, [adamw(model, settings)], settings.gradient_clip, precision, workers.device
        )
        # Moments that the first step made would not be divided over the chips.
        self._begin_optimizers()
        self._lay_out_moments()
        torch_xla.sync(wait=True)

    def loss(self, batch: Batch | ExampleBatch) -> torch.Tensor:
        batch = in_few_shapes(batch, self._chips, self._longest).to(self._device)
        for tensor in vars(batch).values():
            spmd.mark_sharding(tensor, self._mesh, (AXIS, None))
        return super().loss(batch)

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        super().backward(loss, is_last)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self._lay_out(parameter.grad)
        # Ends the program that was traced so far: it is compiled once, and runs.
        torch_xla.sync()

    def update(self, rule: UpdateRule) -> Update:
        update = super().update(rule)
        torch_xla.sync()
        return update

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        # To this process every tensor is whole, so nothing has to be gathered first.
        for name, tensor in self.model.state_dict().items():
            yield name, tensor.detach().float().cpu()

    def write(self, url: str, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        super().write(url, _on_host(tensors), group)

    def read(self, url: str) -> None:
        super().read(url)
        self._lay_out_moments()
        torch_xla.sync(wait=True)

    def _read_into(self) -> dict[str, Any]:
        return _on_host(self.tensors())

    def _lay_out(self, tensor: torch.Tensor) -> None:
        """Divide a tensor over the chips in the first direction that they divide evenly."""
        split = next((n for n, size in enumerate(tensor.shape) if size % self._chips == 0), None)
        layout: Layout = tuple(AXIS if n == split else None for n in range(tensor.ndim))
        spmd.mark_sharding(tensor, self._mesh, layout)

    def _lay_out_moments(self) -> None:
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                for tensor in state.values():
                    # The counter of steps is a single number, which cannot be divided.
                    if tensor.ndim:
                        self._lay_out(tensor)


def build(
    spec: TrainingSpec,
    workers: Workers,
    precision: Precision,
    build_model: Callable[[], TrainableModel],
) -> Xla:
    """The model of a run on the chips."""
    longest = spec.shards.sequence_length
    return Xla(build_model(), spec.training.optimizer, precision, workers, longest)


def _check_shapes(model: TrainableModel) -> None:
    """Refuse a model whose every batch would be another program."""
    network = model.network
    changing = None
    if network.has_router_loss:
        changing = "the load-balancing loss of a mixture of experts"
    elif not network.reads_packed_rows:
        changing = "an encoder to which each text has to be given in a row of its own"
    if changing:
        raise UserError(
            f"`checkpoint.placement.device` is tpu, where {changing} has another shape with each "
            "batch, for which XLA would compile again. Train this base model on a GPU."
        )


def _move(model: nn.Module, device: torch.device) -> None:
    """Move a model, and tie again the weights that have several names, which torch forgets for
    XLA."""
    alike: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        alike.setdefault(id(parameter), []).append(name)
    model.to(device)
    for first, *others in alike.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner).register_parameter(attribute, model.get_parameter(first))


def _on_host(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copies of the training state in the machine's own memory, whole."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), tensors)
