"""Attention over a batch of requests packed into one row, each with its own keys alone.

transformers' own way on a CPU is one product of all queries with the keys of all requests, most of
which a mask then throws away, after the keys were copied once for each query head. Here requests of
about one length that all write their next token are one batched product, others go one by one.
"""

from functools import lru_cache
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

NAME = "own_keys_alone"
PADDED_AT_MOST = 2
"""Times its keys that a batch may be padded to; past that, one by one is quicker."""
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
    is_even = len(known) * max(known) <= PADDED_AT_MOST * sum(known)
    if is_even and all(count == 1 for count in new):
        return _attend_next(query, key, value, tuple(known), scaling, sliding_window), None
    requests = zip(query.split(new, 2), key.split(known, 2), value.split(known, 2), strict=True)
    parts = [_attend_one(*one, scaling, sliding_window) for one in requests]
    return torch.cat(parts, dim=1), None


def _attend_next(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    known: tuple[int, ...],
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """The one newest token of every request, shape (1, requests, heads, size)."""
    (_, heads, _, size), key_heads = query.shape, key.shape[1]
    places, mask = _padded(known, sliding_window)
    # The query heads of one key head stand where the positions would: no key is copied for them.
    rows = query[0].transpose(0, 1).reshape(len(known), key_heads, heads // key_heads, size)
    shape = (key_heads, *mask.shape[::3], size)
    keys, values = (
        states[0].index_select(1, places).view(shape).transpose(0, 1) for states in (key, value)
    )
    attended = scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    return attended.reshape(1, len(known), heads, size)


@lru_cache(maxsize=4)
def _padded(
    known: tuple[int, ...], sliding_window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the requests' tokens are, shape (requests * longest,), and which of them each sees.

    All layers of a step ask the same.
    """
    counts = torch.tensor(known)[:, None]
    numbers = torch.arange(max(known))[None]
    places = torch.minimum(numbers, counts - 1) + (counts.cumsum(0) - counts)
    mask = numbers < counts
    if sliding_window is not None:
        mask &= numbers >= counts - sliding_window
    return places.flatten(), mask[:, None, None]


def _attend_one(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """The newest tokens of one request over all of its tokens, shape (1, new, heads, size)."""
    new, known = query.shape[2], key.shape[2]
    mask = None
    if new < known or (sliding_window is not None and known > sliding_window):
        mask = torch.ones(new, known, dtype=torch.bool).tril(known - new)
        if sliding_window is not None:
            mask = mask.triu(known - new - sliding_window + 1)
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2)
