"""Rotary positions, and attention that never crosses from one document into another."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

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


BLOCK = 64
"""Queries a block in `_attend_in_blocks`; small enough to save most of the causal half."""


@dataclass(frozen=True)
class SegmentMask:
    """Which position may look at which: earlier ones of the same segment, and itself."""

    allowed: torch.Tensor | None
    """Booleans of shape (rows, 1, sequence_length, sequence_length)."""
    bias: torch.Tensor | None = None
    """The same as 0 and minus infinity in bfloat16, where the block-wise form is the faster."""
    blocks: BlockMask | None = None
    """The same for flex attention, on a GPU."""


def allowed_positions(segments: torch.Tensor) -> torch.Tensor:
    """Booleans of shape (rows, 1, sequence_length, sequence_length).

    Args:
        segments: segment number of each position, shape (rows, sequence_length).
    """
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & causal)[:, None]


def segment_mask(segments: torch.Tensor, dtype: torch.dtype) -> SegmentMask:
    """The mask of a batch, made once for all layers that compute in `dtype`."""
    if segments.device.type == "cuda":
        return SegmentMask(None, blocks=document_blocks(segments))
    allowed = allowed_positions(segments)
    if segments.device.type != "cpu" or dtype != torch.bfloat16:
        return SegmentMask(allowed)
    zero = torch.zeros((), dtype=dtype)
    return SegmentMask(allowed, torch.where(allowed, zero, float("-inf")))


def document_blocks(segments: torch.Tensor, is_causal: bool = True) -> BlockMask:
    """`block_mask`, on a GPU by one kernel of its own."""
    build = _compiled_block_mask() if segments.is_cuda else block_mask
    blocks: BlockMask = build(segments, is_causal)
    return blocks


def block_mask(segments: torch.Tensor, is_causal: bool = True) -> BlockMask:
    """The mask of `allowed_positions` in flex attention's form, which skips whole blocks.

    Args:
        is_causal: otherwise a position also looks at later ones of its segment.
    """

    def may_look(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        is_inside = segments[row, query] == segments[row, key]
        return is_inside & (query >= key) if is_causal else is_inside

    rows, length = segments.shape
    return create_block_mask(may_look, rows, None, length, length, device=segments.device)


@functools.cache
def _compiled_block_mask() -> Any:
    """One kernel in the place of a hundred, and of masks as large as all pairs of positions."""
    return torch.compile(block_mask, dynamic=False)


@functools.cache
def _compiled_flex_attention() -> Any:
    """Flex attention is only fast, and only lean, when compiled."""
    return torch.compile(flex_attention, dynamic=False)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: SegmentMask
) -> torch.Tensor:
    """Grouped-query attention over (rows, sequence_length, heads, head_dim), same shape out."""
    if mask.bias is not None:
        return _attend_in_blocks(query, key, value, mask.bias)
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if mask.blocks is not None:
        flex = flex_attention if torch.compiler.is_compiling() else _compiled_flex_attention()
        attended = flex(query, key, value, block_mask=mask.blocks, enable_gqa=grouped)
        return attended.transpose(1, 2)
    attended = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask.allowed, enable_gqa=grouped
    )
    return attended.transpose(1, 2)


def _attend_in_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """The same by plain matrix products, a block of queries at a time, causal half only.

    In bfloat16 on a CPU it takes about 40 % of the time of torch's fused attention, most of whose
    cost is in the backward pass.
    """
    rows, length, heads, size = query.shape
    groups = key.shape[2]
    shared = heads // groups
    query = query.view(rows, length, groups, shared, size).permute(0, 2, 3, 1, 4) * size**-0.5
    key = key.permute(0, 2, 3, 1).reshape(rows * groups, size, length)
    value = value.transpose(1, 2).reshape(rows * groups, length, size)
    attended = []
    for start in range(0, length, BLOCK):
        end = min(start + BLOCK, length)
        block = query[:, :, :, start:end].reshape(rows * groups, -1, size)
        scores = torch.bmm(block, key[:, :, :end]).view(rows, groups, shared, end - start, end)
        weights = torch.softmax(scores + bias[:, :, None, start:end, :end], dim=-1)
        mixed = torch.bmm(weights.view(rows * groups, -1, end), value[:, :end])
        attended.append(mixed.view(rows, groups, shared, end - start, size))
    return torch.cat(attended, dim=3).permute(0, 3, 1, 2, 4).reshape(rows, length, heads, size)
