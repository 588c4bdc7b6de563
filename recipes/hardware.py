"""What the machine does and could do: memory, utilisation, power, model FLOP/s."""

import resource
import sys

import torch

PEAK_BFLOAT16_FLOPS = {
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L4": 121e12,
    "V100": 125e12,
    "T4": 65e12,
}
"""Dense bfloat16 (float16 where a card has no bfloat16) peaks by name, from the data sheets."""


def flops_per_token(
    parameters: int, layers: int, heads: int, head_dim: int, sequence_length: int
) -> float:
    """Forward and backward FLOPs a token: 6N + 12·L·H·Q·T (Chowdhery et al., "PaLM", 2022)."""
    return 6.0 * parameters + 12.0 * layers * heads * head_dim * sequence_length


def peak_flops(device: torch.device) -> float | None:
    """The device's bfloat16 peak, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_BFLOAT16_FLOPS.items() if key in name), None)


def device_readings(device: torch.device) -> dict[str, float]:
    """Peak memory so far, and on a GPU with NVML its utilisation and power."""
    if device.type != "cuda":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return {"peak_memory_gb": peak * (1 if sys.platform == "darwin" else 1024) / 1e9}
    readings = {"peak_memory_gb": torch.cuda.max_memory_allocated(device) / 1e9}
    try:
        readings["gpu_utilisation_percent"] = float(torch.cuda.utilization(device))
        readings["gpu_power_watts"] = torch.cuda.power_draw(device) / 1000
    except (ModuleNotFoundError, RuntimeError):
        # NVML's Python package is optional.
        return readings
    return readings
