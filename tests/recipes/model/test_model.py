"""Models compute what Hugging Face's do, and no document sees another."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from artifacts.errors import UserError
from artifacts.shards.shard_set import ShardSet
from recipes.data.batch import IGNORED, read_batch
from recipes.model import decoder as module
from recipes.model.causal_model import TrainableModel, TransformersNetwork, load_model
from recipes.model.decoder import Decoder, summed_cross_entropy, to_gradient_by_mask
from tests.recipes.conftest import export
from tests.recipes.model.test_architectures import packed
from tests.tiny import change_config

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama 3 rope, tied": LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters=LLAMA_3_ROPE
    ),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral with a window": MistralConfig(**SIZES, sliding_window=128),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


@pytest.fixture(params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A random model of each supported family in a Hugging Face folder."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def logits_of(model: TrainableModel, tokens: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    hidden = model.network(tokens, positions, torch.zeros_like(tokens))
    return hidden @ model.network.head_weight.T


@torch.no_grad()
def test_logits_equal_hugging_faces_both_ways(folder: Path, tmp_path: Path) -> None:
    tokens = torch.randint(0, 96, (3, 64))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = reference(tokens).logits

    model = load_model(folder).eval()
    is_gpt2 = reference.config.model_type == "gpt2"
    assert isinstance(model.network, TransformersNetwork if is_gpt2 else Decoder)

    torch.testing.assert_close(logits_of(model, tokens), expected, atol=1e-4, rtol=0)
    export(model, folder, tmp_path / "export")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert torch.equal(exported(tokens).logits, expected)
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config.get("rope_theta") == config.get("rope_parameters", {}).get("rope_theta")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_two_documents_in_a_row_cost_what_they_cost_apart(folder: Path, precision: str) -> None:
    model = load_model(folder)
    documents = [torch.randint(0, 96, (length,)) for length in (70, 33)]
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        expected = sum(float(model(packed([document]))) for document in documents)
        found = float(model(packed(documents)))
    assert found == pytest.approx(expected, rel=1e-5 if precision == "float32" else 3e-3)


@pytest.mark.parametrize("rows", [1, 40])
def test_loss_and_its_gradients_are_those_of_plain_cross_entropy(rows: int) -> None:
    torch.manual_seed(2)
    hidden = torch.randn(rows, 50, 16, requires_grad=True)
    weight = torch.randn(96, 16, requires_grad=True)
    targets = torch.randint(0, 96, (rows, 50))
    targets[:, ::7] = IGNORED

    summed_cross_entropy(hidden, weight, targets).backward()
    found = (hidden.grad, weight.grad)
    hidden.grad = weight.grad = None
    logits = F.linear(hidden, weight).flatten(0, 1)
    plain = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
    plain.backward()

    for ours, theirs in zip(found, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_bfloat16_attention_is_close_to_float32(base_model: Path, train_split: ShardSet) -> None:
    batch = read_batch(train_split, torch.arange(8).numpy())
    losses, gradients = [], []
    for mixed in (False, True):
        model = load_model(base_model)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = model(batch) / batch.target_count
        loss.backward()
        losses.append(float(loss))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    assert float(difference) < 0.02


def test_weights_that_do_not_fit_the_config_are_refused(base_model: Path, tmp_path: Path) -> None:
    changed = change_config(base_model, tmp_path / "changed", num_hidden_layers=3)
    with pytest.raises(UserError, match=r"do not fit config\.json"):
        load_model(changed)


def test_the_gradient_of_the_output_matrix_is_added_up_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over many chunks, also where the matrix arrives from other workers in bfloat16."""
    torch.manual_seed(0)
    hidden, targets = torch.randn(1, 4096, 32), torch.randint(0, 64, (1, 4096))
    gradients = []
    for chunk in (4096, 8):
        monkeypatch.setitem(module.TOKENS_IN_FLIGHT, "cpu", chunk)
        matrix = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
        matrix.requires_grad_()
        summed_cross_entropy(hidden, matrix, targets).backward()
        gradients.append(matrix.grad.float())
    whole, in_chunks = gradients
    assert (whole - in_chunks).norm() < 2e-3 * whole.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_computes_the_same_loss_and_gradient_without_a_scatter(dtype: torch.dtype) -> None:
    """For which Inductor would write all logits in float32, 4 GB of a vocabulary of 128,256."""
    torch.manual_seed(0)
    logits, targets = torch.randn(300, 500).to(dtype), torch.randint(0, 500, (300,))
    targets[::5] = IGNORED
    expected = logits.clone().float().requires_grad_()
    loss = F.cross_entropy(expected, targets, ignore_index=IGNORED, reduction="sum")
    loss.backward()
    traced = make_fx(lambda x: to_gradient_by_mask(x, targets, True))(logits.clone())
    torch.testing.assert_close(to_gradient_by_mask(logits, targets, True), loss)
    torch.testing.assert_close(logits, expected.grad.to(dtype))
    assert not [node for node in traced.graph.nodes if "scatter" in str(node.target)]
