"""All TPU chips of a machine, through torch_xla: one process, one program for all of them."""

import os
from typing import ClassVar

import torch

from artifacts.errors import UserError
from recipes.device import KINDS, Device
from recipes.distributed.workers import Workers
from recipes.settings import Precision

TPU_VARIABLE = "PJRT_DEVICE"
"""Names the hardware that XLA compiles for; `CPU` tries on a processor what is meant for TPUs."""


class Tpu(Device):
    """What is otherwise than on a processor."""

    # Its own loops: fused, they are not made for XLA; captured, they divide by a rate of zero.
    adamw: ClassVar[dict[str, bool]] = {"foreach": False}

    @property
    def tries_on(self) -> torch.device:
        # XLA would compile every little trial.
        return torch.device("cpu")

    def precision(self) -> Precision:
        return "bfloat16"


def join(count: int) -> Workers:
    """The one worker that drives all chips; raises UserError where there are several processes, no
    TPU chips, or no torch_xla in this environment."""
    if count > 1:
        raise UserError(
            "`checkpoint.placement.device` is tpu, where one process drives all chips of one "
            f"machine, but {count} were started. Train on one machine."
        )
    KINDS["xla"] = Tpu
    asked = os.environ.get(TPU_VARIABLE)
    try:
        import torch_xla
        import torch_xla.runtime as runtime
    except ImportError as error:
        raise UserError(
            "`checkpoint.placement.device` is tpu, for which this environment has no torch_xla "
            f"({error}). Make the one that has it: make setup-tpu"
        ) from None
    # Without being asked, torch_xla takes the processor where it finds no chips.
    if asked is None and runtime.device_type() != "TPU":
        raise UserError(
            "`checkpoint.placement.device` is tpu, but this machine has no TPU chips. Train on one "
            f"that has, or set the device to auto; {TPU_VARIABLE}=CPU tries the same program on "
            "the processor."
        )
    runtime.use_spmd()
    return Workers(0, 1, torch_xla.device(), chips=runtime.global_runtime_device_count())
