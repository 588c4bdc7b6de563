"""Attention that never crosses from one document into another."""

from typing import TypeAlias

import torch
import torch.nn.functional as F

AttentionMask: TypeAlias = torch.Tensor


def segment_mask(segments: torch.Tensor) -> AttentionMask:
    """Which position may look at which: earlier ones of the same segment, and itself.

    Args:
        segments: segment number of each position, shape (rows, sequence_length).

    Returns:
        Booleans of shape (rows, 1, sequence_length, sequence_length).
    """
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    return ((segments[:, :, None] == segments[:, None, :]) & causal)[:, None]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: AttentionMask
) -> torch.Tensor:
    """Grouped-query attention over (rows, sequence_length, heads, head_dim), same shape out."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)
    return attended.transpose(1, 2)
