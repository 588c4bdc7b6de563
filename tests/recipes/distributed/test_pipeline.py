"""Layers split into stages compute what they do together."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from transformers import Qwen3Config

from artifacts.errors import UserError
from recipes.distributed.pipeline import StageModel
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder.network import Decoder, DecoderShape
from recipes.settings import PlacementSettings
from recipes.spec import TrainingSpec, read_metrics
from recipes.training.setup import check_inputs
from tests.recipes.conftest import SpecMaker, course, kill_at, launcher, run, settings_of

STAGES = {
    "steps": 30,
    "checkpointing": {"every_steps": 6},
    "pipeline_parallel": 2,
    "device_batch_size": 1,
}


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
    exported, expected = (
        load_file(Path(x.export_folder) / "model.safetensors") for x in (spec, unbroken)
    )
    assert exported.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(exported[name], weight, atol=2e-4, rtol=1e-3)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("workers", "placement"),
    [
        (2, {"activation_checkpointing": True}),
        (4, {"tensor_parallel": 2}),
        (4, {"in_background": "always"}),
        (8, {"replicas": 2, "tensor_parallel": 2}),
    ],
    ids=["alone", "split_matrices", "sharded_saving_in_the_background", "all_at_once"],
)
def test_stages_take_the_same_course(
    make_spec: SpecMaker, unbroken: TrainingSpec, workers: int, placement: dict[str, object]
) -> None:
    spec = make_spec("stages", **STAGES, **placement)
    code, output = run(spec, launcher(workers))
    assert code == 0, output
    assert "Warning" not in output
    assert_same_course(spec, unbroken)


@pytest.mark.soak
def test_stages_go_on_together_and_back(make_spec: SpecMaker, unbroken: TrainingSpec) -> None:
    spec = make_spec("stages", **STAGES, audit_rows=True)
    whole = spec.model_copy(
        update={"training": spec.training.model_copy(update={"placement": PlacementSettings()})}
    )
    kill_at(spec, 7, launcher(2))
    kill_at(whole, 16)
    code, output = run(spec, launcher(4))
    assert code == 0, output
    assert "Going on from the checkpoint of step" in output
    tokens = [[line["targets"] for line in read_metrics(Path(x.run_folder))] for x in (spec, whole)]
    assert tokens[0] == tokens[1]
    assert_same_course(spec, unbroken)


@pytest.mark.soak
def test_three_stages_have_layers_norms_and_an_output_matrix_of_their_own(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    steps = {"steps": 6, "recipe": "pretraining", "precision": "float32"}
    alone = make_spec("alone", **steps)
    stages = make_spec("stages", **steps, pipeline_parallel=3, device_batch_size=1)
    folder = tmp_path / "model"
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
    for spec, program in ((alone, None), (stages, launcher(3))):
        code, output = run(spec.model_copy(update={"base_model_folder": str(folder)}), program)
        assert code == 0, output
    assert_same_course(stages, alone)


def test_passes_that_do_not_fill_the_stages_are_refused_with_what_fits(
    make_spec: SpecMaker,
) -> None:
    workers = Workers(0, 4, torch.device("cpu"), pipeline_parallel=4)
    for rows, batch, remedy in (
        (4, 8, r"device_batch_size` to 2\."),
        (3, 8, r"device_batch_size` to 2\."),
        (1, 2, r"global_batch_size` to 4\."),
    ):
        spec = make_spec(
            "refused",
            pipeline_parallel=4,
            workers=4,
            device_batch_size=rows,
            global_batch_size=batch,
        )
        with pytest.raises(UserError, match=remedy):
            check_inputs(spec, workers)


def test_more_stages_than_layers_are_refused(base_model: Path) -> None:
    from transformers import AutoConfig

    model = TrainableModel(
        Decoder(DecoderShape.from_config(AutoConfig.from_pretrained(base_model)))
    )
    layers = len(model.network.layers)
    workers = Workers(0, layers + 1, torch.device("cpu"), pipeline_parallel=layers + 1)
    with pytest.raises(UserError, match=f"has {layers} layers. Set it to {layers} or less"):
        StageModel(model, workers, "float32")


def test_what_has_not_been_made_to_go_with_it_is_refused() -> None:
    for other in ({"lora": {}}, {"optimizer": {"name": "muon"}}, {"precision": "float8"}):
        with pytest.raises(ValidationError, match=r"placement\.pipeline_parallel"):
            settings_of(pipeline_parallel=2, **other)
