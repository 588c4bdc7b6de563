"""Machine types of Vertex AI and what they compute with: what goes together, how fast, how large.

From the page "Configure compute resources for training" and the vendors' data sheets.
"""

import re
from dataclasses import dataclass

TPU_FAMILIES = ("cloud-tpu", "ct")
"""What the names of machine types with TPUs begin with."""


@dataclass(frozen=True)
class Accelerator:
    """One accelerator, by its vendor's data sheet."""

    teraflops: float
    """Peak of dense bfloat16; of half precision where `bfloat16` is false."""
    gigabytes: float
    """Memory that programs see, in GiB, rounded down."""
    bfloat16: bool = True
    """Whether its units multiply bfloat16."""


ACCELERATORS = {
    "NVIDIA_TESLA_P100": Accelerator(18.7, 15.5, bfloat16=False),
    "NVIDIA_TESLA_V100": Accelerator(112, 15.5, bfloat16=False),
    "NVIDIA_TESLA_T4": Accelerator(65, 14.5, bfloat16=False),
    "NVIDIA_L4": Accelerator(121, 22),
    "NVIDIA_TESLA_A100": Accelerator(312, 39),
    "NVIDIA_A100_80GB": Accelerator(312, 79),
    "NVIDIA_H100_80GB": Accelerator(989, 79),
    "NVIDIA_H100_MEGA_80GB": Accelerator(989, 79),
    "NVIDIA_H200_141GB": Accelerator(989, 139),
    "NVIDIA_RTX_PRO_6000": Accelerator(503, 94),
    "NVIDIA_B200": Accelerator(2_250, 178),
    "NVIDIA_GB200": Accelerator(2_500, 184),
}
OUTDATED = {"NVIDIA_TESLA_K80", "NVIDIA_TESLA_P4"}
"""Accelerators for which PyTorch is no longer built, or with too little memory to train."""
BUILT_IN = {
    **{f"a2-highgpu-{n}g": ("NVIDIA_TESLA_A100", n) for n in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("NVIDIA_TESLA_A100", 16),
    **{f"a2-ultragpu-{n}g": ("NVIDIA_A100_80GB", n) for n in (1, 2, 4, 8)},
    **{f"a3-highgpu-{n}g": ("NVIDIA_H100_80GB", n) for n in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("NVIDIA_H100_MEGA_80GB", 8),
    "a3-ultragpu-8g": ("NVIDIA_H200_141GB", 8),
    "a4-highgpu-8g": ("NVIDIA_B200", 8),
    "a4x-highgpu-4g": ("NVIDIA_GB200", 4),
    **{f"g2-standard-{cores}": ("NVIDIA_L4", 1) for cores in (4, 8, 12, 16, 32)},
    "g2-standard-24": ("NVIDIA_L4", 2),
    "g2-standard-48": ("NVIDIA_L4", 4),
    "g2-standard-96": ("NVIDIA_L4", 8),
    **{f"g4-standard-{48 * n}": ("NVIDIA_RTX_PRO_6000", n) for n in (1, 2, 4, 8)},
}
"""Machine types that have accelerators of their own: kind and number."""
FAMILIES_WITH_ACCELERATORS = re.compile(r"(a\d+x?|g\d+)-")
ADDED = {
    "NVIDIA_TESLA_P100": (1, 2, 4),
    "NVIDIA_TESLA_V100": (1, 2, 4, 8),
    "NVIDIA_TESLA_T4": (1, 2, 4),
}
"""Accelerators that are added to a machine of the family n1, and how many."""


@dataclass(frozen=True)
class TpuMachine:
    """One machine with TPU chips, which its type alone describes."""

    chips: int
    topology: str
    """How they are wired, as Vertex AI names it."""
    teraflops: float = 197
    """Peak of one chip in bfloat16."""


TPU_MACHINES = {
    "ct5lp-hightpu-1t": TpuMachine(1, "1x1"),
    "ct5lp-hightpu-4t": TpuMachine(4, "2x2"),
    "ct5lp-hightpu-8t": TpuMachine(8, "2x4"),
}
"""Machines with TPU v5e, by type."""


def check_accelerator(machine_type: str, accelerator_type: str | None, count: int) -> None:
    """Raise ValueError where Vertex AI has no such machine with such accelerators."""
    if (accelerator_type is None) != (count == 0):
        raise ValueError(
            "accelerator_type and accelerator_count go together: both, or neither (null, 0)"
        )
    if accelerator_type is not None and accelerator_type not in ACCELERATORS:
        raise ValueError(
            f"accelerator_type is {accelerator_type}, and none of {', '.join(ACCELERATORS)}"
        )
    if own := BUILT_IN.get(machine_type):
        if own != (accelerator_type, count):
            raise ValueError(
                f"{machine_type} has {own[1]} {own[0]} of its own: set accelerator_type to "
                f"{own[0]} and accelerator_count to {own[1]}"
            )
    elif FAMILIES_WITH_ACCELERATORS.match(machine_type):
        raise ValueError(
            f"{machine_type} is no machine type with accelerators: {', '.join(BUILT_IN)}"
        )
    elif accelerator_type is not None and not machine_type.startswith(TPU_FAMILIES):
        _check_added(machine_type, accelerator_type, count)


def _check_added(machine_type: str, accelerator_type: str, count: int) -> None:
    with_it = [name for name, (kind, _) in BUILT_IN.items() if kind == accelerator_type]
    if with_it:
        raise ValueError(
            f"{machine_type} takes no {accelerator_type}; with it come {', '.join(with_it)}"
        )
    if not machine_type.startswith("n1-"):
        raise ValueError(f"{machine_type} takes no {accelerator_type}; machines of n1 do")
    if count not in ADDED[accelerator_type]:
        raise ValueError(
            f"a machine of n1 takes {', '.join(map(str, ADDED[accelerator_type]))} "
            f"{accelerator_type}, and not {count}"
        )
