"""The optimizers and their parameter groups."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from recipes.model.causal_model import TrainableModel
from recipes.optimization.muon import SplitMuon
from recipes.sections import OptimizerSettings

Optimizers = Sequence[torch.optim.Optimizer]


def build_optimizers(model: TrainableModel, settings: OptimizerSettings) -> Optimizers:
    """Fused AdamW over everything, or Muon over the layers' matrices and AdamW over the rest.

    Matrices decay; norms and biases do not. Muon (Jordan et al., 2024) takes AdamW's learning rate,
    its updates being scaled to the same size (Liu et al., 2025).
    """
    in_layers = {id(p) for p in model.network.layers.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    muon = [p for p in trained if p.ndim == 2 and id(p) in in_layers]
    if settings.name == "adamw":
        return [_adamw(trained, settings)]
    by_muon = {id(p) for p in muon}
    is_split = any(isinstance(p, DTensor) for p in muon)
    kind = SplitMuon if is_split else torch.optim.Muon
    return [
        kind(
            muon,
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        _adamw([p for p in trained if id(p) not in by_muon], settings),
    ]


def _adamw(parameters: list[nn.Parameter], settings: OptimizerSettings) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        fused=True,
    )


def set_learning_rate(optimizers: Optimizers, learning_rate: float) -> None:
    """Give every group the learning rate of this step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
