"""Products of a layer's matrices in float8, by torchao (Micikevicius et al., 2022)."""

from dataclasses import replace

import torch
from torch import nn

from artifacts.errors import UserError
from recipes.model.causal_model import TrainableModel

OLDEST_CAPABILITY = (8, 9)
"""Of a GPU that multiplies it: L4, H100, H200 and later."""
MULTIPLE = 16
"""Which the sizes of a matrix have to be for it."""


def multiply_in_float8(model: TrainableModel, device: torch.device) -> None:
    """Change the layers of a model in place; each row of a matrix has a scale of its own.

    On a processor the same numbers are multiplied in another type, for trials.

    Raises:
        UserError: the GPU has no such units.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        raise UserError(
            f"`checkpoint.precision` is float8, which {torch.cuda.get_device_name(device)} does "
            "not multiply; L4, H100, H200 and later do. Set it to bfloat16."
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(
        model.network.layers,
        config=replace(config, emulate=device.type == "cpu"),
        module_filter_fn=lambda module, name: _fits(module),
    )


def _fits(module: nn.Module) -> bool:
    assert isinstance(module, nn.Linear)
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0
