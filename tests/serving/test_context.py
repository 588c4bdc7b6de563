"""How long a text fits beside a model's weights."""

import pytest

from artifacts.errors import UserError
from artifacts.model.folder import bytes_per_token
from serving.vertex.context import fit_context

GIGABYTE = 1024**3
LLAMA_3B = {
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 3072,
    "max_position_embeddings": 131_072,
    "dtype": "bfloat16",
}
WEIGHTS_3B = 6_430_000_000
GPT2 = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}


def test_context_is_the_models_own_where_memory_holds_it() -> None:
    assert fit_context(LLAMA_3B, WEIGHTS_3B, None) == 131_072
    assert fit_context(LLAMA_3B, WEIGHTS_3B, 60 * GIGABYTE) == 131_072
    assert fit_context(GPT2, 500_000_000, 16 * GIGABYTE) == 1024


def test_long_context_is_cut_to_what_one_small_accelerator_holds() -> None:
    memory = int(16.8 * GIGABYTE)
    tokens = fit_context(LLAMA_3B, WEIGHTS_3B, memory)
    assert tokens % 256 == 0 and tokens < 131_072
    assert WEIGHTS_3B + tokens * bytes_per_token(LLAMA_3B) <= memory
    assert WEIGHTS_3B + (tokens + 256) * bytes_per_token(LLAMA_3B) > memory


def test_float32_weights_are_loaded_in_half_precision() -> None:
    stored = LLAMA_3B | {"dtype": "float32"}
    memory = int(16.8 * GIGABYTE)
    assert fit_context(stored, 2 * WEIGHTS_3B, memory) == fit_context(LLAMA_3B, WEIGHTS_3B, memory)


def test_model_that_leaves_no_room_is_refused_with_what_to_ask_for() -> None:
    with pytest.raises(
        UserError, match=r"(?s)weights take 6\.4 GB of the 6\.4 GB.*accelerator_type"
    ):
        fit_context(LLAMA_3B, WEIGHTS_3B, 6 * GIGABYTE)


def test_keys_and_values_are_counted_by_the_heads_that_have_them() -> None:
    assert bytes_per_token(LLAMA_3B) == 2 * 28 * 8 * 128 * 2
    assert bytes_per_token(GPT2) == 2 * 12 * 12 * 64 * 2
