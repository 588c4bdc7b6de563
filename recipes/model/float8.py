"""Layers whose matrix products are in float8, by torchao."""

from dataclasses import replace

import torch
from torch import nn

from artifacts.errors import UserError
from recipes.model.causal_model import TrainableModel

OLDEST_CAPABILITY = (8, 9)
"""The compute capability from which GPUs multiply float8: L4, H100, H200 and later."""
MULTIPLE = 16
"""The sizes of a matrix have to be multiples of this to be multiplied in float8."""


def multiply_in_float8(model: TrainableModel, device: torch.device) -> None:
    """Change the layers of a model in place; each row of a matrix has a scale of its own.

    On a processor the same numbers are multiplied in another type, for trials. Raises UserError
    where the GPU has no such units, or no matrix of the model fits them.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        raise UserError(
            f"`checkpoint.precision` is float8, which {torch.cuda.get_device_name(device)} does "
            "not multiply; L4, H100, H200 and later do. Set it to bfloat16."
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = model.network.layers
    if not any(isinstance(module, nn.Linear) and _fits(module) for module in layers.modules()):
        raise UserError(
            "`checkpoint.precision` is float8, but no matrix of this model's layers can be "
            "multiplied in it: that takes linear layers (torch's nn.Linear) whose sizes are "
            f"multiples of {MULTIPLE}. Set it to bfloat16."
        )
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(
        layers,
        config=replace(config, emulate=device.type == "cpu"),
        module_filter_fn=lambda module, name: _fits(module),
    )


def _fits(module: nn.Module) -> bool:
    assert isinstance(module, nn.Linear)
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
