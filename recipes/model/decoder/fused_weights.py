"""Phi-3's checkpoints fuse the matrices that have the same input; the decoder has them apart."""

import torch

QUERY_KEY_VALUE = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


def split_fused(
    weights: dict[str, torch.Tensor], query_rows: int, key_value_rows: int
) -> dict[str, torch.Tensor]:
    """The decoder's weights from a checkpoint that has `qkv_proj` and `gate_up_proj`.

    Args:
        weights: by name, every tensor of shape (rows, columns) where it is fused.
        query_rows: heads times head size.
        key_value_rows: key and value heads times head size.
    """
    rows = [query_rows, key_value_rows, key_value_rows]
    split: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if ".qkv_proj." in name:
            parts = zip(QUERY_KEY_VALUE, tensor.split(rows), strict=True)
            split |= {name.replace("qkv_proj", part): piece.clone() for part, piece in parts}
        elif ".gate_up_proj." in name:
            parts = zip(GATE_UP, tensor.chunk(2), strict=True)
            split |= {name.replace("gate_up_proj", part): piece.clone() for part, piece in parts}
        else:
            split[name] = tensor
    return split


def fuse(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The reverse of `split_fused`."""
    fused: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        for whole, names in (("qkv_proj", QUERY_KEY_VALUE), ("gate_up_proj", GATE_UP)):
            first, *rest = names
            if f".{first}." in name:
                parts = [weights[name.replace(first, part)] for part in names]
                fused[name.replace(first, whole)] = torch.cat(parts)
                break
            if any(f".{part}." in name for part in rest):
                break
        else:
            fused[name] = tensor
    return fused
