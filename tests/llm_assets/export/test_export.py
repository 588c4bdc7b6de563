"""A model in another form says what it said before."""

import shutil
from pathlib import Path
from typing import get_args

import gguf
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import llm_assets.export.export as export
from artifacts.errors import UserError
from llm_assets.export.export import Form, export_model
from tests.recipes.model.architectures import architectures, tiny_config, write_tiny
from tests.tiny import VOCAB_SIZE


def written(architecture: str, folder: Path, tokenizer: Path) -> Path:
    """A tiny random model of an architecture, with a tokenizer."""
    config = tiny_config(architectures()[architecture], vocab_size=VOCAB_SIZE)
    if architecture == "qwen3":
        # transformers' reader of GGUF takes this size of a head for granted.
        config.head_dim = 128
    write_tiny(config, folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    return sharpened(folder)


def sharpened(folder: Path) -> Path:
    """The model with larger weights: what random ones predict is nearly even, whatever is wrong."""
    weights = load_file(folder / "model.safetensors")
    larger = {name: one * 8 if one.ndim > 1 else one for name, one in weights.items()}
    save_file(larger, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """The tiny Llama, sharpened."""
    copied = tmp_path_factory.mktemp("sharp") / "model"
    return sharpened(shutil.copytree(tiny_model_folder, copied))


@pytest.mark.parametrize("form", get_args(Form))
def test_a_form_predicts_as_the_model_does(form: Form, model_folder: Path, tmp_path: Path) -> None:
    found = export_model(model_folder, form, tmp_path / "taken", "manuals-3")
    assert found.fits and found.served == pytest.approx(found.evaluated, rel=3e-3)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3"])
def test_families_written_as_gguf(
    architecture: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    folder = written(architecture, tmp_path / "model", tiny_model_folder)
    assert export_model(folder, "gguf", tmp_path / "taken", "m").fits


def test_gguf_has_the_tokens_the_merges_and_their_splitting(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    export_model(tiny_model_folder, "gguf", tmp_path / "taken", "m")
    fields = gguf.GGUFReader(tmp_path / "taken" / "m.gguf").fields
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    assert fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    assert len(fields["tokenizer.ggml.merges"].contents()) > 100
    assert (tmp_path / "taken" / "Modelfile").read_text().startswith("FROM ./m.gguf\n")


@pytest.mark.parametrize(
    ("architecture", "said"), [("gpt2", "GPT2LMHeadModel"), ("gemma2", "Gemma2ForCausalLM")]
)
def test_family_that_was_not_checked_is_refused_by_name(
    architecture: str, said: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    folder = written(architecture, tmp_path / "model", tiny_model_folder)
    with pytest.raises(UserError, match=rf"{said}.*convert_hf_to_gguf"):
        export_model(folder, "gguf", tmp_path / "taken", "m")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_does_not_predict_as_the_model_does_is_not_left_behind(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_damaged(folder: Path, draft: Path, called: str) -> None:
        original(folder, draft, called)
        weights = load_file(draft / "model.safetensors")
        name = "model.layers.1.mlp.down_proj.weight"
        weights[name] = weights[name].flip(0)
        save_file(weights, draft / "model.safetensors", {"format": "pt"})

    original = export.FORMS["safetensors"]
    monkeypatch.setitem(export.FORMS, "safetensors", write_damaged)
    with pytest.raises(UserError, match="does not predict as the model does"):
        export_model(model_folder, "safetensors", tmp_path / "taken", "m")
    assert not list(tmp_path.iterdir())


def test_folder_that_is_there_already_stays(tiny_model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is there already"):
        export_model(tiny_model_folder, "gguf", tmp_path, "m")
