"""What differs between the kinds of hardware that programs run on: processors, GPUs and others.

Where a single kernel differs, such as attention, it looks at its tensors' device itself.
"""

import contextlib
import re
import resource
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import ClassVar, Literal

import torch

from recipes.settings import Precision

PEAK_BFLOAT16_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100 SXM2": 125e12,
    "V100 PCIe": 112e12,
    "T4": 65e12,
}
"""Dense bfloat16 (float16 where a card has no bfloat16) peaks by words of the name, the more exact
first; from NVIDIA's data sheet of each card, half of what it states for sparse matrices."""


class Device:
    """A processor; other hardware says what it does otherwise."""

    group_backend: ClassVar[str] = "gloo"
    """The backend by which workers exchange messages."""
    compiles: ClassVar[bool] = False
    """Whether `placement.compile: auto` compiles, which pays where it takes effect at once."""
    saves_every_steps: ClassVar[int | None] = 8
    """After how many steps at least the state is saved, where `checkpointing.every_steps` is
    absent; None saves by time alone."""
    logs_every_steps: ClassVar[int] = 1
    """What `logging.every_steps` is where it is absent."""
    saves_in_background: ClassVar[bool] = False
    """What `checkpointing.in_background: auto` means."""
    attends_by_blocks: ClassVar[bool] = False
    """Whether flex attention is fast, and can be differentiated at all."""
    reads_ahead: ClassVar[bool] = False
    """Whether the next rows are read while it computes; a processor computes with what reads."""
    sends_bfloat16: ClassVar[bool] = False
    """Whether weights of a training in bfloat16 travel between workers as such."""
    adamw: ClassVar[dict[str, bool]] = {"fused": True}
    """In which of torch's forms AdamW takes its steps."""

    def __init__(self, place: torch.device) -> None:
        self.place = place

    @property
    def name(self) -> str:
        """The name under which results on this hardware are kept."""
        return self.place.type

    @property
    def tries_on(self) -> torch.device:
        """Where a model is tried before it is trained."""
        return self.place

    def precision(self) -> Precision:
        """bfloat16 where the hardware multiplies it natively."""
        has = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        # oneDNN multiplies, and may have been told to use less than the processor has
        # (ONEDNN_MAX_CPU_ISA); without its units it takes an emulation, far slower than float32.
        fast = has and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return "bfloat16" if fast else "float32"

    def peak_flops(self) -> float | None:
        """Its bfloat16 peak, or None where it is not known."""
        return None

    def memory(self) -> float | None:
        """Bytes of its own memory; None where it has that of the machine."""
        return None

    def readings(self) -> dict[str, float]:
        """Peak memory so far; of a GPU what NVML tells of it, where that can be read."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # Linux counts kilobytes, macOS bytes.
        return {"peak_memory_gb": peak * (1 if sys.platform == "darwin" else 1024) / 1e9}


class Gpu(Device):
    """A GPU, through CUDA."""

    # Checkpoints are saved from host memory, hence a CPU backend beside nccl.
    group_backend = "cpu:gloo,cuda:nccl"
    compiles = True
    saves_every_steps = None
    logs_every_steps = 10
    saves_in_background = True
    attends_by_blocks = True
    reads_ahead = True
    sends_bfloat16 = True

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.place)

    def precision(self) -> Precision:
        # torch emulates bfloat16 on older cards, such as a T4, where it is slower than float32.
        is_native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if is_native else "float32"

    def peak_flops(self) -> float | None:
        words = set(re.findall(r"\w+", self.name.upper()))
        peaks = PEAK_BFLOAT16_FLOPS.items()
        card_peak = next((peak for key, peak in peaks if set(key.upper().split()) <= words), None)
        # A part of a card has a part of its peak.
        return None if "MIG" in words else card_peak

    def memory(self) -> float | None:
        return float(torch.cuda.get_device_properties(self.place).total_memory)

    def readings(self) -> dict[str, float]:
        readings = {"peak_memory_gb": torch.cuda.max_memory_allocated(self.place) / 1e9}
        figures: dict[str, tuple[Callable[[torch.device], float], float]] = {
            "gpu_utilisation_percent": (torch.cuda.utilization, 1),
            "gpu_power_watts": (torch.cuda.power_draw, 1e-3),
            "gpu_temperature_celsius": (torch.cuda.temperature, 1),
            "gpu_memory_used_gb": (torch.cuda.device_memory_used, 1e-9),
        }
        for name, (measure, unit) in figures.items():
            # NVML's package is optional, its errors are of no common kind, and cards refuse some
            # readings: a figure that is missing ends no training.
            with suppress(Exception):
                readings[name] = measure(self.place) * unit
        return readings


KINDS: dict[str, type[Device]] = {"cpu": Device, "cuda": Gpu}
"""By the type of torch's device; a strategy that brings other hardware adds to it."""


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


def choose_precision(
    wanted: Literal["auto", "bfloat16", "float32", "float8"], place: torch.device
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
