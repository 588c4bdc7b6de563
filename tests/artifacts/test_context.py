"""How long a text fits beside a model's weights."""

import json
import os
from pathlib import Path

import pytest

from artifacts.errors import UserError
from artifacts.model import bytes_per_token, context_tokens, longest_context

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


def stored(folder: Path, config: dict[str, object], size: int = WEIGHTS_3B) -> str:
    """A model whose weights take that much, of which nothing is written."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").touch()
    os.truncate(folder / "model.safetensors", size)
    return str(folder)


def test_context_is_the_models_own_where_memory_holds_it(tmp_path: Path) -> None:
    llama = stored(tmp_path, LLAMA_3B)
    assert longest_context(llama, None) == 131_072
    assert longest_context(llama, 60 * GIGABYTE) == 131_072
    assert longest_context(stored(tmp_path, GPT2, 500_000_000), 16 * GIGABYTE) == 1024
    # What a token takes is not told, so nothing is compared.
    assert longest_context(stored(tmp_path, {"max_seq_len": 2048}), 16 * GIGABYTE) == 2048
    pictures_too = stored(tmp_path, {"text_config": LLAMA_3B})
    assert longest_context(pictures_too, 60 * GIGABYTE) == 131_072


def test_long_context_is_cut_to_what_one_small_accelerator_holds(tmp_path: Path) -> None:
    memory = int(16.8 * GIGABYTE)
    tokens = longest_context(stored(tmp_path, LLAMA_3B), memory)
    assert tokens % 256 == 0 and tokens < 131_072
    assert WEIGHTS_3B + tokens * bytes_per_token(LLAMA_3B) <= memory
    assert WEIGHTS_3B + (tokens + 256) * bytes_per_token(LLAMA_3B) > memory


def test_float32_weights_are_loaded_in_half_precision(tmp_path: Path) -> None:
    memory = int(16.8 * GIGABYTE)
    halved = longest_context(stored(tmp_path, LLAMA_3B), memory)
    whole = stored(tmp_path, LLAMA_3B | {"dtype": "float32"}, 2 * WEIGHTS_3B)
    assert longest_context(whole, memory) == halved
    # The part that reads text tells of the precision that it once had, or of none.
    for dtype in ("bfloat16", None):
        config = {"dtype": "float32", "text_config": LLAMA_3B | {"dtype": dtype}}
        assert longest_context(stored(tmp_path, config, 2 * WEIGHTS_3B), memory) == halved


def test_model_that_leaves_no_room_is_refused_with_what_to_ask_for(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"(?s)weights take 6\.4 GB of the 6\.4 GB.*accelerator_type"
    ):
        longest_context(stored(tmp_path, LLAMA_3B), 6 * GIGABYTE)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"model_type": "t5", "n_positions": 512, "relative_attention_num_buckets": 32}, None),
        ({"model_type": "mpt", "max_seq_len": 2048}, 2048),
        ({"model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 1}, 512),
    ],
)
def test_context_is_what_the_positions_of_a_family_leave(
    config: dict[str, object], tokens: int | None
) -> None:
    assert context_tokens(config) == tokens


def test_keys_and_values_are_counted_by_the_heads_that_have_them() -> None:
    assert bytes_per_token(LLAMA_3B) == 2 * 28 * 8 * 128 * 2
    assert bytes_per_token(GPT2) == 2 * 12 * 12 * 64 * 2
