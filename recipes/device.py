"""What differs between the kinds of hardware that programs run on: processors, GPUs and TPUs.

What only one kernel does otherwise, such as attention, it tells by the type of its tensors' device.
"""

import contextlib
import os
import resource
import sys
from typing import ClassVar, Literal

import torch

from artifacts.errors import UserError
from recipes.settings.sections import Precision

PEAK_BFLOAT16_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Dense bfloat16 (float16 where a card has no bfloat16) peaks by name, from the data sheets."""
TPU_VARIABLE = "PJRT_DEVICE"
"""Names the hardware that XLA compiles for; `CPU` tries on a processor what is meant for TPUs."""


class Device:
    """A processor; other hardware says what it does otherwise."""

    group_backend: ClassVar[str] = "gloo"
    """What workers send each other messages by."""
    compiles: ClassVar[bool] = False
    """Whether `placement.compile: auto` compiles, which pays where it takes effect at once."""
    saves_in_background: ClassVar[bool] = False
    """What `checkpointing.in_background: auto` means."""
    sends_bfloat16: ClassVar[bool] = False
    """Whether weights of a training in bfloat16 travel between workers as such."""
    adamw: ClassVar[dict[str, bool]] = {"fused": True}
    """In which of torch's forms AdamW takes its steps."""

    def __init__(self, place: torch.device) -> None:
        self.place = place

    @property
    def name(self) -> str:
        """What its results are told apart by."""
        return self.place.type

    @property
    def tries_on(self) -> torch.device:
        """Where a model is tried before it is trained."""
        return self.place

    def precision(self) -> Precision:
        """bfloat16 where the hardware multiplies it natively."""
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        return "bfloat16" if fast else "float32"

    def peak_flops(self) -> float | None:
        """Its bfloat16 peak, or None where it is not known."""
        return None

    def readings(self) -> dict[str, float]:
        """Peak memory so far, and utilization and power where they can be read."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_memory_gb": peak * (1 if sys.platform == "darwin" else 1024) / 1e9}


class Gpu(Device):
    """A GPU, through CUDA."""

    # Checkpoints are saved from host memory, hence a CPU backend beside nccl.
    group_backend = "cpu:gloo,cuda:nccl"
    compiles = True
    saves_in_background = True
    sends_bfloat16 = True

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.place)

    def precision(self) -> Precision:
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"

    def peak_flops(self) -> float | None:
        return next((peak for key, peak in PEAK_BFLOAT16_FLOPS.items() if key in self.name), None)

    def readings(self) -> dict[str, float]:
        readings = {"peak_memory_gb": torch.cuda.max_memory_allocated(self.place) / 1e9}
        try:
            readings["gpu_utilisation_percent"] = float(torch.cuda.utilization(self.place))
            readings["gpu_power_watts"] = torch.cuda.power_draw(self.place) / 1000
        except (ModuleNotFoundError, RuntimeError):
            # NVML's Python package is optional.
            return readings
        return readings


class Tpu(Device):
    """All TPU chips of a machine, through torch_xla: one process, one program for all of them."""

    # Its own loops: fused, they are not made for XLA; captured, they divide by a rate of zero.
    adamw: ClassVar[dict[str, bool]] = {"foreach": False}

    @property
    def tries_on(self) -> torch.device:
        # XLA would compile every little trial.
        return torch.device("cpu")

    def precision(self) -> Precision:
        return "bfloat16"


KINDS: dict[str, type[Device]] = {"cpu": Device, "cuda": Gpu, "xla": Tpu}


def device_of(place: torch.device) -> Device:
    """What is known of the hardware behind one of torch's devices."""
    return KINDS[place.type](place)


def local_device(local_rank: int = 0) -> torch.device:
    """A GPU of this machine by its number, else the processor."""
    if torch.cuda.is_available():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def count_gpus() -> int:
    """GPUs that PyTorch can use on this machine."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def start_tpu() -> tuple[torch.device, int]:
    """All TPU chips of this machine as one device: `(device, number of chips)`.

    Raises:
        UserError: there are none, or this environment has no torch_xla.
    """
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
    return torch_xla.device(), runtime.global_runtime_device_count()


def choose_precision(
    wanted: Literal["auto", "bfloat16", "float32"], place: torch.device
) -> Precision:
    """Resolve `auto`: bfloat16 where the hardware multiplies it natively."""
    return device_of(place).precision() if wanted == "auto" else wanted


def mixed_precision(
    precision: Precision, place: torch.device
) -> contextlib.AbstractContextManager[None]:
    """Autocast to bfloat16 over float32 weights, or nothing."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(place.type, torch.bfloat16)


def model_utilization(
    flops: float, tokens_per_second: float, place: torch.device
) -> dict[str, float]:
    """Model FLOP/s as a share of a device's peak, where that is known.

    Args:
        flops: forward and backward, per token.
        tokens_per_second: of this one device.
    """
    peak = device_of(place).peak_flops()
    return {} if peak is None else {"mfu": flops * tokens_per_second / peak}
