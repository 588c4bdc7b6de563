"""Which arithmetic this machine does fast."""

import contextlib
from typing import Literal

import torch

from recipes.settings.sections import Precision


def choose_precision(
    wanted: Literal["auto", "bfloat16", "float32"], device: torch.device
) -> Precision:
    """Resolve `auto`: bfloat16 where the hardware multiplies it natively."""
    if wanted != "auto":
        return wanted
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported() else "float32"
    fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if fast else "float32"


def mixed_precision(
    precision: Precision, device: torch.device
) -> contextlib.AbstractContextManager[None]:
    """Autocast to bfloat16 over float32 weights, or nothing."""
    if precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, torch.bfloat16)
