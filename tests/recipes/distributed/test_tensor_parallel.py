"""Matrices split over workers compute what whole ones do."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, Qwen3Config

from artifacts.errors import UserError
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder.network import Decoder, DecoderShape
from recipes.settings import PlacementSettings
from recipes.spec import TrainingSpec, read_metrics
from recipes.training.setup import split_matrices
from tests.recipes.conftest import SpecMaker, course, kill_at, launcher, run, settings_of


def weights_of(spec: TrainingSpec) -> dict[str, torch.Tensor]:
    return load_file(Path(spec.export_folder) / "model.safetensors")


SPLIT = {
    "steps": 30,
    "checkpointing": {"every_steps": 6},
    "tensor_parallel": 2,
    "device_batch_size": 2,
    "activation_checkpointing": True,
}


@pytest.mark.soak
def test_split_matrices_take_the_same_course(make_spec: SpecMaker, unbroken: TrainingSpec) -> None:
    spec = make_spec("split", **SPLIT)
    code, output = run(spec, launcher(2))
    assert code == 0, output
    assert_same_course(spec, unbroken)


@pytest.mark.soak
def test_split_matrices_go_on_whole_and_back(make_spec: SpecMaker, unbroken: TrainingSpec) -> None:
    spec = make_spec("split", **SPLIT)
    whole = spec.model_copy(
        update={"training": spec.training.model_copy(update={"placement": PlacementSettings()})}
    )
    kill_at(spec, 7, launcher(2))
    kill_at(whole, 16)
    code, output = run(spec, launcher(2))
    assert code == 0, output
    assert "Going on from the checkpoint of step" in output

    tokens = [[line["targets"] for line in read_metrics(Path(x.run_folder))] for x in (spec, whole)]
    assert tokens[0] == tokens[1]
    assert_same_course(spec, unbroken)


def assert_same_course(spec: TrainingSpec, unbroken: TrainingSpec) -> None:
    """Losses, gradients' norms and weights are those of one worker with whole matrices."""
    ours, theirs = course(spec), course(unbroken)
    assert [loss for loss, _, _ in ours] == pytest.approx([x[0] for x in theirs], rel=1e-5)
    assert [norm for _, norm, _ in ours] == pytest.approx([x[1] for x in theirs], rel=1e-4)
    exported, expected = weights_of(spec), weights_of(unbroken)
    assert exported.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(exported[name], weight, atol=2e-4, rtol=1e-3)


@pytest.mark.soak
def test_it_goes_together_with_sharding_and_saving_in_the_background(
    make_spec: SpecMaker, unbroken: TrainingSpec
) -> None:
    spec = make_spec(
        "mixed",
        steps=30,
        checkpointing={"every_steps": 6},
        tensor_parallel=2,
        in_background="always",
    )
    kill_at(spec, 13, launcher(4))
    code, output = run(spec, launcher(4))
    assert code == 0, output
    assert "Going on from the checkpoint of step" in output
    ours = [loss for loss, _, _ in course(spec)]
    assert ours == pytest.approx([loss for loss, _, _ in course(unbroken)], rel=1e-5)


@pytest.mark.soak
def test_head_norms_biases_and_an_output_matrix_of_its_own_are_split_too(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    steps = {"steps": 6, "recipe": "pretraining", "precision": "float32"}
    alone, split = make_spec("alone", **steps), make_spec("split", **steps, tensor_parallel=2)
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(Path(alone.base_model_folder) / "tokenizer.json", folder)
    sizes = json.loads((Path(alone.base_model_folder) / "config.json").read_text())
    config = Qwen3Config(
        vocab_size=sizes["vocab_size"],
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        attention_bias=True,
        architectures=["Qwen3ForCausalLM"],
    )
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    for spec, program in ((alone, None), (split, launcher(2))):
        code, output = run(spec.model_copy(update={"base_model_folder": str(folder)}), program)
        assert code == 0, output
    ours, theirs = course(split), course(alone)
    assert [loss for loss, _, _ in ours] == pytest.approx([x[0] for x in theirs], rel=1e-5)
    assert [norm for _, norm, _ in ours] == pytest.approx([x[1] for x in theirs], rel=1e-4)


def test_heads_that_cannot_be_divided_are_refused(base_model: Path) -> None:
    config = AutoConfig.from_pretrained(base_model)
    model = TrainableModel(Decoder(DecoderShape.from_config(config)))
    # Three workers, of which this process is one and the others are never heard of.
    dist.init_process_group("fake", rank=0, world_size=3, store=FakeStore())
    try:
        with pytest.raises(UserError, match=r"tensor_parallel. is 3, which does not divide .* 4"):
            split_matrices(model, init_device_mesh("cpu", (3,)))
    finally:
        dist.destroy_process_group()


def test_adapters_and_muon_are_refused_beside_it() -> None:
    for other in ({"lora": {}}, {"optimizer": {"name": "muon"}}):
        with pytest.raises(ValidationError, match="goes with neither lora nor muon"):
            settings_of(tensor_parallel=2, **other)
