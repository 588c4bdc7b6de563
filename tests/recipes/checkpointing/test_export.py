"""A model is written as its weights come, and no more of it is held than one file has."""

import gc
import json
import os
import resource
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artifacts.model import end_tokens_of, read_config, read_tokenizer
from artifacts.reasons import reason_of
from recipes.checkpointing import export as exporting
from recipes.checkpointing.export import export_model
from recipes.data.records import SEEN_NAME, TRAINED_NAME
from recipes.distributed.strategy import FullySharded
from recipes.distributed.workers import Workers
from recipes.encoders.classification import load_classifier
from recipes.model.causal_model import TrainableModel, load_model
from recipes.model.lora import add_adapters
from recipes.sections import LoraSettings
from recipes.spec import METRICS_NAME
from tests.example_shards import example_shards
from tests.recipes.conftest import SpecMaker, export, on_model, same, train_here
from tests.recipes.model.architectures import tiny_config, write_tiny
from tests.tiny import change_config, change_weights, tiny_base_model
from tests.tiny_models import CHAT_TEMPLATE, chat_model
from tests.tiny_tasks import TASKS

CPU = torch.device("cpu")


class Watched(FullySharded):
    """Notes how many bytes of what it gave are still held when it gives the next weight."""

    most = 0

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._given: list[tuple[weakref.ref[torch.Tensor], int]] = []
        for name, tensor in super().weights():
            whole = tensor.clone()
            self._given.append((weakref.ref(whole), whole.nbytes))
            yield name, whole
            del whole
            self.most = max(self.most, self.held())

    def held(self) -> int:
        gc.collect()
        return sum(size for reference, size in self._given if reference() is not None)


def test_no_more_than_one_file_is_held(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(base_model)
    strategy = Watched(model, [], 1.0, "float32", CPU)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    largest = max(tensor.nbytes for tensor in whole.values())
    monkeypatch.setattr(exporting, "MAX_SHARD_BYTES", largest)
    export_model(strategy, base_model, tmp_path / "model", torch.float32, Workers(0, 1, CPU))

    assert strategy.most <= 2 * largest < sum(tensor.nbytes for tensor in whole.values())
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [path.name for path in files]
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    written = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert {f"network.{name}" for name in written} == whole.keys()
    assert all(tensor.equal(whole[f"network.{name}"]) for name, tensor in written.items())
    again = load_model(tmp_path / "model").state_dict()
    assert all(tensor.equal(whole[name]) for name, tensor in again.items())


def test_adapted_weights_are_not_held_in_float32_while_they_are_written(
    base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lora = load_model(base_model), LoraSettings(rank=2, targets=("q_proj",))
    add_adapters(model, lora, seed=0)
    strategy, held = Watched(model, [], 1.0, "float32", CPU), list[int]()
    monkeypatch.setattr(exporting, "_write_weights", lambda *_: held.append(strategy.held()))
    one = Workers(0, 1, CPU)
    export_model(strategy, base_model, tmp_path / "model", torch.bfloat16, one, lora)

    assert strategy.most > 0 and held == [0]


def test_what_was_read_of_quantized_weights_is_exported_as_plain(tmp_path: Path) -> None:
    """gpt-oss is published with its experts in four bits."""

    def quantize(weights: dict[str, Any]) -> None:
        for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inputs, outputs = weights.pop(name).shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            weights |= {f"{name}_blocks": blocks, f"{name}_scales": blocks[..., 0] // 64 + 120}

    sizes = {"hidden_size": 64, "intermediate_size": 64}
    write_tiny(tiny_config(CONFIG_MAPPING["gpt_oss"], **sizes), tmp_path / "plain")
    change_weights(tmp_path / "plain", tmp_path / "quantized", quantize)
    method = {"quant_method": "mxfp4"}
    base = change_config(tmp_path / "quantized", tmp_path / "base", quantization_config=method)
    model = load_model(base)
    export(model, base, tmp_path / "model")

    assert not hasattr(AutoConfig.from_pretrained(tmp_path / "model"), "quantization_config")
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert written["model.layers.0.mlp.experts.down_proj"].dtype == torch.float32
    again = load_model(tmp_path / "model").state_dict()
    assert all(tensor.equal(again[name]) for name, tensor in model.state_dict().items())


def as_classifier(folder: Path) -> TrainableModel:
    return load_classifier(folder, ["a", "b"], 0, None)


@pytest.mark.parametrize(
    ("kind", "auto", "load"),
    [
        ("gpt_neox", AutoModelForCausalLM, load_model),
        ("mixtral", AutoModelForCausalLM, load_model),
        ("nomic_bert", AutoModelForSequenceClassification, as_classifier),
    ],
)
def test_weights_are_written_as_their_family_publishes_them(
    kind: str, auto: Any, load: Callable[[Path], TrainableModel], tmp_path: Path
) -> None:
    """transformers 5 reads some under other names, or as one of many, and other engines do not."""
    base, exported = tmp_path / "base", tmp_path / "model"
    write_tiny(tiny_config(CONFIG_MAPPING[kind], is_decoder=False), base, auto)
    export(load(base), base, exported)
    before, after = (load_file(folder / "model.safetensors") for folder in (base, exported))
    assert same(before, after)


def test_a_chat_model_that_read_documents_ends_an_answer_where_they_end(
    make_spec: SpecMaker, base_model: Path, tmp_path: Path
) -> None:
    """Its own EOS ends a turn, and after documents it does not come."""
    chat = shutil.copytree(base_model, tmp_path / "chat")
    generation = json.loads((chat / "generation_config.json").read_text())
    document_end = generation["eos_token_id"]
    generation["eos_token_id"] = turn_end = document_end + 1
    (chat / "generation_config.json").write_text(json.dumps(generation))
    for base, ends in ((chat, [turn_end, document_end]), (base_model, [document_end])):
        spec = on_model(make_spec(steps=1), base)
        train_here(spec)
        assert end_tokens_of(read_config(Path(spec.export_folder))) == ends


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("examples", [{}, {"template": "plain"}, {"chat_template": "{{ 1 }}"}])
def test_the_chat_template_is_the_one_that_the_rows_were_written_by(
    examples: dict[str, Any], is_file: bool, tmp_path: Path
) -> None:
    """Whichever the model has that training began with, such as a champion of other settings."""
    task, base, champion = TASKS["fine_tuning"], tmp_path / "base", tmp_path / "champion"
    chat_model(base)
    stats = example_shards(
        tmp_path / "shards", base, replace(task, tokenized_shards={"examples": examples})
    )
    other = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tiny_base_model(champion)
    if is_file:
        (champion / "chat_template.jinja").write_text(other)
    else:
        config = champion / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": other}))
    assert read_tokenizer(champion).chat_template == other

    model = load_model(champion)
    model.export_form_of(stats, champion)
    export(model, champion, tmp_path / "model")

    plainly = examples.get("template") == "plain"
    used = None if plainly else examples.get("chat_template", CHAT_TEMPLATE)
    assert read_tokenizer(tmp_path / "model").chat_template == used


@pytest.mark.fault(
    "checkpoint",
    "no space left while the trained model is written",
    sees="the reason and the folder",
    then="the next run writes it from the last checkpoint",
)
def test_a_full_disk_at_the_export_is_named(base_model: Path, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(Exception, match="too large") as caught:
            export(load_model(base_model), base_model, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{tmp_path} may not grow further" in str(reason_of(caught.value, str(tmp_path)))
    assert not exporting.is_whole(tmp_path / "model")


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """What is brought to the disk, in order."""
    found: list[Path] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    return found


def test_the_config_is_written_once_all_else_is_on_the_disk(
    base_model: Path, tmp_path: Path, flushed: list[Path]
) -> None:
    made, copied = tmp_path / "model", tmp_path / "copied"
    export(load_model(base_model), base_model, made)
    exporting.copy_model(made, copied)

    for folder in (made, copied):
        config = next(n for n, path in enumerate(flushed) if path.name.startswith(".config.json"))
        others = {path for path in folder.iterdir() if path.name != "config.json"}
        assert folder / "model.safetensors" in others and {folder, *others} <= {*flushed[:config]}
        del flushed[: config + 1]


def test_a_run_is_complete_once_its_records_are_on_the_disk(
    make_spec: SpecMaker, flushed: list[Path]
) -> None:
    spec = make_spec(steps=1)
    train_here(spec)
    (end,) = (n for n, path in enumerate(flushed) if path.name.startswith(".result.json"))
    records = {Path(spec.run_folder, name) for name in (SEEN_NAME, TRAINED_NAME, METRICS_NAME)}
    assert records <= {*flushed[:end]}
