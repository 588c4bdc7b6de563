"""Which parameters decay, and which Muon takes."""

from pathlib import Path
from typing import Literal

import pytest
import torch

from recipes.model.causal_model import load_model
from recipes.optimization import build_optimizers
from recipes.sections import OptimizerSettings
from tests.recipes.model.architectures import tiny_kind


@pytest.mark.parametrize("kind", ["gpt_oss", "gpt2", "llama"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_biases_and_norms_do_not_decay_and_are_no_matrices(
    kind: str, optimizer: Literal["adamw", "muon"], tiny_model_folder: Path, tmp_path: Path
) -> None:
    """Those of a mixture's experts lie in one tensor of two dimensions."""
    model = load_model(tiny_kind(kind, tiny_model_folder, tmp_path / "model"))
    optimizers = build_optimizers(model, OptimizerSettings(name=optimizer, weight_decay=0.1))
    decays = {
        id(p): (bool(group["weight_decay"]), type(one))
        for one in optimizers
        for group in one.param_groups
        for p in group["params"]
    }
    for name, p in model.named_parameters():
        is_matrix = p.ndim > 1 and "bias" not in name
        does_decay, by = decays.pop(id(p))
        assert does_decay == is_matrix, name
        assert is_matrix or by is torch.optim.AdamW, name
    assert not decays
    assert (torch.optim.Muon in set(map(type, optimizers))) == (optimizer == "muon")
