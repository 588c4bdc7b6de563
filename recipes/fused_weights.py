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
    split: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if ".qkv_proj." in name:
            parts = tensor.split([query_rows, key_value_rows, key_value_rows])
            fused, names = "qkv_proj", QUERY_KEY_VALUE
        elif ".gate_up_proj." in name:
            parts, fused, names = tensor.chunk(2), "gate_up_proj", GATE_UP
        else:
            split[name] = tensor
            continue
        for part_name, part in zip(names, parts, strict=True):
            split[name.replace(fused, part_name)] = part.clone()
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
