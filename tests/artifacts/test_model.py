"""Model folders: some must not be served; what is written here, transformers 4 and 5 read alike."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from artifacts.errors import UserError
from artifacts.model import (
    check_model_folder,
    older_config,
    older_tokenizer,
    write_older_names,
)


def _header(content: bytes) -> Callable[[Path], object]:
    weights = len(content).to_bytes(8, "little") + content
    return lambda folder: (folder / "model.safetensors").write_bytes(weights)


def _written(name: str, **values: object) -> Callable[[Path], object]:
    """Values of one of a folder's JSON files, beside those that it has."""

    def write(folder: Path) -> None:
        path = folder / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(before | values))

    return write


def _index(weight_map: object) -> Callable[[Path], object]:
    return _written("model.safetensors.index.json", weight_map=weight_map)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is damaged"),
        (lambda folder: (folder / "tokenizer.json").unlink(), r"no tokenizer\.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no model\.safetensors"),
        (_header(b"x" * 500), r"model\.safetensors is damaged"),
        (_header(b'{"a": {"dtype": "F32"}}'), r"model\.safetensors is damaged"),
        (_header(b"[]"), r"model\.safetensors is damaged"),
        (
            _written("config.json", max_position_embeddings="many"),
            r"config\.json has .*: max_position_embeddings: Input should be a valid integer",
        ),
        (
            _written("config.json", text_config={"vocab_size": [1]}),
            r": text_config\.vocab_size: Input should be a valid integer",
        ),
        (_written("config.json", text_config=7), ": text_config: "),
        (_written("config.json", architectures=[1]), r": architectures\.0: "),
        (
            _written("generation_config.json", eos_token_id=[0, "</s>"]),
            r"generation_config\.json has .*: eos_token_id\.",
        ),
        (
            lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
            "holds an adapter alone",
        ),
        (_index(["a"]), r"index\.json has .*: weight_map: "),
        (_index({"a": "../secret"}), r": weight_map\.a: "),
    ],
)
def test_damaged_or_dangerous_folder_is_refused_by_name(
    tmp_path: Path, tiny_model_folder: Path, damage: Callable[[Path], object], message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    check_model_folder(folder)
    damage(folder)
    with pytest.raises(UserError, match=message):
        check_model_folder(folder)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_rotary_base_is_where_transformers_4_looks_for_it() -> None:
    """It took 10,000 for SmolLM2's 100,000 without a word."""
    plain = {"dtype": "bfloat16", "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}
    older = older_config(plain)
    assert older == plain | {"rope_theta": 1e5, "torch_dtype": "bfloat16"}
    scaled = older_config({"rope_parameters": LLAMA3})
    assert scaled["rope_theta"] == 500_000.0
    assert scaled["rope_scaling"] == {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    assert older_config({"model_type": "gpt2"}) == {"model_type": "gpt2"}


def test_tokenizer_has_a_class_and_tokens_that_transformers_4_knows() -> None:
    """It refused `TokenizersBackend`."""
    written = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"]}
    assert older_tokenizer(written) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "additional_special_tokens": ["<a>"],
    }
    before = {"tokenizer_class": "GPT2Tokenizer"}
    assert older_tokenizer(before) == before


@pytest.mark.parametrize("rope", [LLAMA3, {"rope_type": "default", "rope_theta": 100_000.0}])
def test_transformers_5_reads_the_same_model_as_before(
    tiny_model_folder: Path, tmp_path: Path, rope: dict[str, object]
) -> None:
    config = json.loads((tiny_model_folder / "config.json").read_text())
    longer = {"rope_parameters": rope, "max_position_embeddings": 131_072}
    (tmp_path / "config.json").write_text(json.dumps(config | longer))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_model_folder / name).read_bytes())
    model, tokenizer = AutoConfig.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    write_older_names(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == model.rope_parameters
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again("the valve").input_ids == tokenizer("the valve").input_ids
    assert again.all_special_tokens == tokenizer.all_special_tokens
