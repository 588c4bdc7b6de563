"""Trainings that are spread in different ways, and have to take one course."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from recipes.settings import PlacementSettings
from recipes.spec import TrainingSpec, read_metrics
from tests.recipes.conftest import course, exported, kill_at, launcher, on_model, run_well


def assert_same_course(spec: TrainingSpec, unbroken: TrainingSpec) -> None:
    """Losses, gradients' norms, validation and weights are those of one worker."""
    ours, theirs = course(spec), course(unbroken)
    assert [loss for loss, _, _ in ours] == pytest.approx([x[0] for x in theirs], rel=1e-5)
    assert [norm for _, norm, _ in ours] == pytest.approx([x[1] for x in theirs], rel=1e-4)
    results = [
        json.loads((Path(x.run_folder) / "result.json").read_text()) for x in (spec, unbroken)
    ]
    for key in ("parameters", "tokens_seen", "validation"):
        assert results[0][key] == pytest.approx(results[1][key], rel=1e-4), key
    torch.testing.assert_close(exported(spec), exported(unbroken), atol=2e-4, rtol=1e-3)


def kill_spread_and_whole(spec: TrainingSpec, workers: int, then: int) -> None:
    """Kill a run on some workers, go on with it on one, kill it, and end it on others."""
    whole = spec.model_copy(
        update={"training": spec.training.model_copy(update={"placement": PlacementSettings()})}
    )
    kill_at(spec, 7, launcher(workers))
    kill_at(whole, 16)
    assert "Going on from the checkpoint of step" in run_well(spec, launcher(then))
    tokens = [[line["targets"] for line in read_metrics(Path(x.run_folder))] for x in (spec, whole)]
    assert tokens[0] == tokens[1]


def train_with_all_kinds_of_weights(
    folder: Path, alone: TrainingSpec, spread: TrainingSpec, workers: int
) -> None:
    """Train both from one model with norms of heads, biases and an output matrix of its own."""
    folder.mkdir()
    shutil.copy(Path(alone.base_model_folder) / "tokenizer.json", folder)
    sizes = json.loads((Path(alone.base_model_folder) / "config.json").read_text())
    config = Qwen3Config(
        vocab_size=sizes["vocab_size"],
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        architectures=["Qwen3ForCausalLM"],
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    for spec, program in ((alone, None), (spread, launcher(workers))):
        run_well(on_model(spec, folder), program)
