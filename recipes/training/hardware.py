"""What the machine does and could do: memory, utilization, power, model FLOP/s."""

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


def peak_flops(device: torch.device) -> float | None:
    """The device's bfloat16 peak, or None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for key, peak in PEAK_BFLOAT16_FLOPS.items() if key in name), None)


def model_utilization(
    flops: float, tokens_per_second: float, device: torch.device
) -> dict[str, float]:
    """Model FLOP/s as a share of a device's peak, where that is known.

    Args:
        flops: forward and backward, per token.
        tokens_per_second: of this one device.
    """
    peak = peak_flops(device)
    return {} if peak is None else {"mfu": flops * tokens_per_second / peak}


def device_readings(device: torch.device) -> dict[str, float]:
    """Peak memory so far, and on a GPU with NVML its utilization and power."""
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
