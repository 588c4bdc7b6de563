"""Attention that never crosses from one document into another."""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

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
        return SegmentMask(None, blocks=block_mask(segments))
    allowed = allowed_positions(segments)
    if segments.device.type != "cpu" or dtype != torch.bfloat16:
        return SegmentMask(allowed)
    zero = torch.zeros((), dtype=dtype)
    return SegmentMask(allowed, torch.where(allowed, zero, float("-inf")))


def block_mask(segments: torch.Tensor) -> BlockMask:
    """The mask of `allowed_positions` in flex attention's form, which skips whole blocks."""

    def may_look(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (query >= key) & (segments[row, query] == segments[row, key])

    rows, length = segments.shape
    return create_block_mask(may_look, rows, None, length, length, device=segments.device)


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
