"""Rotary positions (Su et al., "RoFormer", 2021) in the half-rotation layout."""

from typing import Any

import torch

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine, each of shape (rows, sequence_length, 1, head_dim / 2), float32."""


def rotary_frequencies(
    rope: dict[str, Any], head_dim: int, device: torch.device
) -> tuple[torch.Tensor, float]:
    """`(frequencies of shape (head_dim / 2,), attention scale)` as transformers computes them."""
    kind = rope.get("rope_type", "default")
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / (rope["rope_theta"] ** steps)
    if kind == "default":
        return frequencies, 1.0
    if kind == "linear":
        return frequencies / rope["factor"], 1.0
    if kind == "llama3":
        return _stretch_long_waves(frequencies, rope), 1.0
    raise ValueError(f"rope_type {kind} is not supported by this decoder")


SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3")


def _stretch_long_waves(frequencies: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: short waves stay, long ones stretch by `factor`, a ramp between."""
    context = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = context * frequencies / (2 * torch.pi)
    ramp = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (ramp + (1 - ramp) / rope["factor"])


def rotation_at(positions: torch.Tensor, frequencies: torch.Tensor, scale: float) -> Rotation:
    """The rotation at given positions, of shape (rows, sequence_length); made once a batch."""
    angles = positions[..., None, None].float() * frequencies
    return angles.cos() * scale, angles.sin() * scale


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn queries or keys of shape (rows, sequence_length, heads, head_dim)."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return turned.to(x.dtype)
