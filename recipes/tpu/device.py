"""All TPU chips of a machine, through torch_xla: one process, one program for all of them.

Importing this loads no torch_xla.
"""

import os
from typing import ClassVar

import torch
import torch.nn.functional as F

from artifacts.errors import UserError
from recipes.data.batch import IGNORED, Batch, ExampleBatch
from recipes.device import KINDS, Device
from recipes.distributed.workers import Workers
from recipes.settings import Precision

TPU_VARIABLE = "PJRT_DEVICE"
"""Names the hardware that XLA compiles for; `CPU` tries on a processor what is meant for TPUs."""


class Tpu(Device):
    """What is otherwise than on a processor."""

    # Plain loops: there is no fused form for XLA, and the capturable one divides by a rate of zero,
    # with which the optimizers begin.
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
    device_type = os.environ.get(TPU_VARIABLE)
    try:
        import torch_xla
        import torch_xla.runtime as runtime
    except ImportError as error:
        raise UserError(
            "`checkpoint.placement.device` is tpu, for which this environment has no torch_xla "
            f"({error}). Make the one that has it: make setup-tpu"
        ) from None
    # Without being asked, torch_xla takes the processor where it finds no chips.
    if device_type is None and runtime.device_type() != "TPU":
        raise UserError(
            "`checkpoint.placement.device` is tpu, but this machine has no TPU chips. Train on one "
            f"that has, or set the device to auto; {TPU_VARIABLE}=CPU tries the same program on "
            "the processor."
        )
    runtime.use_spmd()
    return Workers(0, 1, torch_xla.device(), chips=runtime.global_runtime_device_count())


# Batches of few shapes, since XLA compiles a program for each shape that it meets.
def in_few_shapes(batch: Batch | ExampleBatch, rows: int, longest: int) -> Batch | ExampleBatch:
    """The batch with padding, which changes no loss, up to a power of two in each direction: rows
    are a multiple of some number, of at most `longest` tokens. Those of packed text are of one
    shape already."""
    if isinstance(batch, Batch):
        return batch
    count = -(-len(batch.tokens) // rows)
    more_rows = rows * _power_of_two(count) - len(batch.tokens)
    more_inputs, more_targets = _more(batch.tokens, longest), _more(batch.targets, longest)
    is_input = F.pad(batch.is_input, (0, more_inputs, 0, more_rows))
    # A model that is shown no token at all answers NaN.
    is_input[len(batch.tokens) :, 0] = True
    return type(batch)(
        F.pad(batch.tokens, (0, more_inputs, 0, more_rows)),
        is_input,
        F.pad(batch.targets, (0, more_targets, 0, more_rows), value=IGNORED),
    )


def _more(tokens: torch.Tensor, longest: int) -> int:
    width = tokens.shape[1]
    return max(0, min(_power_of_two(width), longest) - width) if width > 1 else 0


def _power_of_two(count: int) -> int:
    """The smallest one that is no less."""
    return 1 << (count - 1).bit_length()
