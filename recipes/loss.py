"""Cross-entropy of the next token, without ever holding all logits."""

import torch
import torch.nn.functional as F

from recipes.data import IGNORED


def summed_cross_entropy(
    hidden: torch.Tensor, head_weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """The loss in nats, summed over all positions that have a target.

    Args:
        hidden: shape (rows, sequence_length, hidden_size).
        head_weight: shape (vocabulary, hidden_size).
        targets: shape (rows, sequence_length), `IGNORED` where there is nothing to predict.
    """
    logits = F.linear(hidden.flatten(0, 1), head_weight)
    return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
