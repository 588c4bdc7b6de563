"""Random weights: a sane beginning, and a real text is learnt from nothing."""

import json
import math
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from recipes.spec import TrainingSpec
from tests.recipes.conftest import losses, settings_of, spec_in, train_here
from tests.tiny import tiny_base_model, tiny_shards

VOCAB_SIZE = 512
ARCHITECTURES: dict[str, PretrainedConfig] = {
    "gpt2": GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=96,
        n_layer=3,
        n_head=4,
        n_positions=128,
        architectures=["GPT2LMHeadModel"],
    ),
    "llama": LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ),
}


@pytest.fixture(scope="module")
def python_manual() -> list[str]:
    """A real text: the language reference that ships with Python."""
    return [topics[name] for name in sorted(topics)][:20]


def make_run(folder: Path, texts: list[str], kind: str, **training: Any) -> TrainingSpec:
    """A run from random weights of an architecture, on some texts."""
    model = folder / "model"
    tiny_base_model(model, vocab_size=VOCAB_SIZE)
    (model / "model.safetensors").unlink()
    (model / "config.json").write_text(json.dumps(ARCHITECTURES[kind].to_dict()))
    shards = tiny_shards(folder / "shards", model, texts, sequence_length=128)
    settings = settings_of(
        recipe="pretraining", precision="float32", global_batch_size=8, **training
    )
    return spec_in(folder, model, folder / "shards", shards, settings)


@pytest.mark.parametrize("kind", ["gpt2", pytest.param("llama", marks=pytest.mark.soak)])
def test_a_real_text_is_learnt_from_nothing(
    tmp_path: Path, python_manual: list[str], kind: str
) -> None:
    spec = make_run(
        tmp_path,
        python_manual,
        kind,
        steps=50,
        learning_rate=8e-3,
        checkpointing={"every_steps": 50},
        validation={"every_steps": 50},
        device_batch_size=8,
    )
    bits = train_here(spec).validation
    course = losses(spec)
    assert course[0] == pytest.approx(math.log(VOCAB_SIZE), abs=0.35)
    assert bits["end"] < 0.75 * bits["start"]
    assert sum(course[-10:]) / 10 < 0.75 * course[0]


def test_the_seed_decides_the_weights(tmp_path: Path, python_manual: list[str]) -> None:
    found = []
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        spec = make_run(tmp_path / name, python_manual[:12], "llama", steps=2, seed=seed)
        train_here(spec)
        found.append(losses(spec))
    assert found[0] == found[1] != found[2]
