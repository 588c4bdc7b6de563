"""Linear layers in the memory layout that oneDNN multiplies in.

torch keeps a weight as rows, and oneDNN brings it into its own blocks again for every product. For
the few rows of a decoding step that costs as much as the product itself, so here it is done once.
"""

import torch
from torch import nn


class PackedLinear(nn.Module):
    """Does what a bfloat16 `nn.Linear` does, for inference alone."""

    weight: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        """Copy a layer's weight into oneDNN's layout."""
        super().__init__()
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.register_buffer("weight", packed, persistent=False)
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Shape (..., in features) to (..., out features)."""
        return torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")


def pack_linear_layers(model: nn.Module) -> None:
    """Replace a model's bfloat16 linear layers, where this machine's oneDNN takes bfloat16."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
                setattr(module, name, PackedLinear(child))
