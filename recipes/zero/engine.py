"""DeepSpeed's engine around a model, on PyTorch's own AdamW."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from artifacts.errors import UserError
from recipes.device import device_of
from recipes.distributed.workers import Workers
from recipes.launcher.local import LOOPBACK_INTERFACE
from recipes.model.causal_model import TrainableModel
from recipes.optimization.optimizer import adamw
from recipes.quiet import silence_libraries
from recipes.settings.sections import OptimizerSettings


class GuardedAdamW(torch.optim.AdamW):
    """AdamW that leaves the weights as they are where the step's gradient is not usable.

    DeepSpeed measures the gradient and steps the optimizer in one call, part by part of the
    weights, so this is where a step can still be left out.
    """

    is_usable: Callable[[], bool] = staticmethod(lambda: True)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the part of the weights that DeepSpeed has put into the groups."""
        return super().step(closure) if self.is_usable() else None


def check_configuration(configuration: dict[str, Any]) -> None:
    """Refuse, before a model is read, what DeepSpeed would refuse once it is.

    Raises:
        UserError: naming the key, or what this machine lacks.
    """
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    section = configuration["zero_optimization"]
    try:
        DeepSpeedZeroConfig(**section)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(str(part) for part in fault["loc"])
        raise UserError(
            "`checkpoint.placement.deepspeed.configuration`: DeepSpeed refuses "
            f"zero_optimization.{key}: {fault['msg']}."
        ) from None
    devices = [section.get(key, {}).get("device") for key in ("offload_optimizer", "offload_param")]
    if "nvme" in devices and not AsyncIOBuilder().is_compatible():
        raise UserError(
            "`checkpoint.placement.deepspeed` offloads to nvme, for which this machine lacks "
            "libaio and its headers (Debian: libaio-dev) or a C++ compiler. Install them, or "
            "offload to cpu."
        )


def start_engine(
    model: TrainableModel,
    optimizer: OptimizerSettings,
    configuration: dict[str, Any],
    workers: Workers,
) -> tuple[Any, GuardedAdamW]:
    """Divide the model, which is changed in place, and what trains it over the workers."""
    if not dist.is_initialized():
        _form_group_of_one(workers.device)
    import deepspeed

    # Its import sets the level of its log again.
    silence_libraries()
    # It would compile an operator for inference at its first start, for minutes.
    deepspeed.ops.__compatible_ops__ = {}
    inner = adamw([p for p in model.parameters() if p.requires_grad], optimizer, GuardedAdamW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=inner, config=configuration)
    return engine, inner


def _form_group_of_one(device: torch.device) -> None:
    """The process group that DeepSpeed wants of a single worker too; nobody can connect to it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    os.environ.setdefault("LOCAL_RANK", "0")
    backend = device_of(device).group_backend
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
