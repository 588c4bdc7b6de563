"""What is known of the accelerators that Vertex AI offers."""

from dataclasses import dataclass

GIGABYTE = 1024**3
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
}


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
