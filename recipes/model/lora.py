"""Low-rank adapters beside frozen weights, and merging them again."""

import json
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from artifacts.errors import UserError
from recipes.model.causal_model import TrainableModel
from recipes.sections import LoraSettings, LoraTarget

DOWN, UP, MAGNITUDE = ".lora_a.weight", ".lora_b.weight", ".magnitude"


class AdaptedLinear(nn.Module):
    """A frozen matrix, to whose product that of two narrow ones is added."""

    def __init__(self, linear: nn.Linear, lora: LoraSettings) -> None:
        super().__init__()
        self.weight, self.bias, self._scale = linear.weight, linear.bias, lora.alpha / lora.rank
        self.lora_a = nn.Linear(linear.in_features, lora.rank, bias=False)
        self.lora_b = nn.Linear(lora.rank, linear.out_features, bias=False)
        # So that the adapter adds zero until it has learned something.
        nn.init.zeros_(self.lora_b.weight)
        if lora.dora:
            self.magnitude = nn.Parameter(linear.weight.norm(dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product = F.linear(x, self.weight)
        product = product + self._scale * self.lora_b(self.lora_a(x))
        if hasattr(self, "magnitude"):
            # The length counts as a constant, by which a step needs less memory.
            with torch.no_grad():
                changed = self.weight + self._scale * (self.lora_b.weight @ self.lora_a.weight)
                length = changed.norm(dim=1)
            product = product * (self.magnitude / length).to(product.dtype)
        return product if self.bias is None else product + self.bias.to(product.dtype)


def add_adapters(model: TrainableModel, lora: LoraSettings, seed: int) -> None:
    """Freeze the model and give each targeted matrix of its layers an adapter that adds zero;
    raises UserError where it has none of them."""
    # So that adapters begin alike on every worker.
    torch.manual_seed(seed)
    model.requires_grad_(False)
    adapted, others = 0, set()
    for parent in list(model.network.layers.modules()):
        for name, linear in list(parent.named_children()):
            if name not in get_args(LoraTarget) or not isinstance(linear, nn.Linear):
                continue
            if name not in lora.targets:
                others.add(name)
                continue
            setattr(parent, name, AdaptedLinear(linear, lora))
            adapted += 1
    if not adapted:
        remedy = "Train all weights, without `checkpoint.lora`, or choose another `base_model`"
        if others:
            remedy = f"Name of those that it has: {', '.join(sorted(others))}"
        raise UserError(
            f"`checkpoint.lora.targets`: the model has none of {', '.join(lora.targets)}. {remedy}."
        )


def absent_targets(model: TrainableModel, lora: LoraSettings) -> list[str]:
    """Those that no matrix of an adapted model's layers is called."""
    adapted = {
        name.removesuffix(DOWN).rpartition(".")[2]
        for name, _ in model.named_parameters()
        if name.endswith(DOWN)
    }
    return [target for target in lora.targets if target not in adapted]


def merge_adapters(weights: dict[str, torch.Tensor], lora: LoraSettings) -> dict[str, torch.Tensor]:
    """Weights with every adapter added to its matrix, under the base model's names."""
    merged = {name: tensor for name, tensor in weights.items() if not _is_adapter(name)}
    for name, down in weights.items():
        if name.endswith(DOWN):
            matrix = name.removesuffix(DOWN)
            change = lora.alpha / lora.rank * (weights[matrix + UP] @ down)
            changed = merged[f"{matrix}.weight"] + change
            if lora.dora:
                changed *= (weights[matrix + MAGNITUDE] / changed.norm(dim=1))[:, None]
            merged[f"{matrix}.weight"] = changed
    return merged


def write_adapter(
    weights: dict[str, torch.Tensor], lora: LoraSettings, base_model: Path, folder: Path
) -> None:
    """Write the adapters alone, in the form that the PEFT library reads."""
    folder.mkdir(parents=True, exist_ok=True)
    adapters = {
        "base_model.model."
        + name.replace(".lora_a.", ".lora_A.")
        .replace(".lora_b.", ".lora_B.")
        .replace(MAGNITUDE, ".lora_magnitude_vector"): tensor.contiguous()
        for name, tensor in weights.items()
        if _is_adapter(name)
    }
    save_file(adapters, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "use_dora": lora.dora,
        "bias": "none",
        "target_modules": list(lora.targets),
        "base_model_name_or_path": str(base_model),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def _is_adapter(name: str) -> bool:
    return name.endswith((DOWN, UP, MAGNITUDE))
