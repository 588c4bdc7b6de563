"""The optimizer and its parameter groups."""

import torch
from torch import nn

from recipes.settings import TrainingSettings


def build_optimizer(model: nn.Module, training: TrainingSettings) -> torch.optim.Optimizer:
    """Fused AdamW; matrices decay, norms and biases do not."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in parameters if p.ndim >= 2],
            "weight_decay": training.weight_decay,
        },
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=training.learning_rate,
        betas=training.betas,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give every group the learning rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
