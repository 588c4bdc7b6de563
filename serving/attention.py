"""Attention over a batch of requests packed into one row, one request after another.

transformers' own way on a CPU is one product of all queries with the keys of all requests, most of
which a mask then throws away, after the keys were copied once for each query head. Here each
request's queries meet its own keys alone.
"""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "request_by_request"
UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""What some models ask of their attention and `scaled_dot_product_attention` cannot do."""


def register() -> None:
    """Make this attention known to transformers under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One layer's attention, by the interface that transformers gives for it.

    Args:
        query: shape (1, heads, new tokens of all requests, head size).
        key: shape (1, key heads, new tokens of all requests, head size); value likewise.
        kwargs: what continuous batching says about the batch: the cache of earlier keys and values,
            and where each request begins.

    Returns:
        Shape (1, new tokens of all requests, heads, head size), and no weights.

    Raises:
        ValueError: the model asks for something that this cannot do.
    """
    if asked := [name for name in UNSUPPORTED if kwargs.get(name) is not None]:
        raise ValueError(f"The model's attention uses {', '.join(asked)}, which is not served.")
    key, value = kwargs["cache"].update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=kwargs
    )
    new = kwargs["cu_seq_lens_q"].diff().tolist()
    # The cache has put this layer's own lengths here.
    known = kwargs["cu_seq_lens_k"].diff().tolist()
    requests = zip(query.split(new, 2), key.split(known, 2), value.split(known, 2), strict=True)
    parts = [_attend_one(*one, scaling, sliding_window) for one in requests]
    return torch.cat(parts, dim=1), None


def _attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """The newest tokens of one request over all of its tokens, shape (1, new, heads, size)."""
    (_, heads, new, size), (_, key_heads, known, _) = query.shape, key.shape
    cut = sliding_window is not None and known > sliding_window
    if new == 1 and not cut:
        # The query heads of one key head stand where the positions would: no key is copied.
        rows = query.reshape(1, key_heads, heads // key_heads, size)
        return scaled_dot_product_attention(rows, key, value, scale=scaling).reshape(
            1, 1, heads, -1
        )
    mask = None
    if cut or new < known:
        mask = torch.ones(new, known, dtype=torch.bool).tril(known - new)
        if sliding_window is not None:
            mask = mask.triu(known - new - sliding_window + 1)
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2)
