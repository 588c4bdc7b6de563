"""Layers split into stages compute what they do together."""

from pathlib import Path

import pytest
import torch

from artifacts.errors import UserError
from recipes.distributed.pipeline import StageModel
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder import Decoder, DecoderShape
from recipes.spec import TrainingSpec
from recipes.training.setup import check_inputs
from tests.recipes.conftest import SpecMaker, launcher, run_well
from tests.recipes.distributed.one_course import (
    assert_same_course,
    kill_spread_and_whole,
    train_with_all_kinds_of_weights,
)

STAGES = {
    "steps": 30,
    "checkpointing": {"every_steps": 6},
    "pipeline_parallel": 2,
    "device_batch_size": 1,
}


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
    assert "Warning" not in run_well(spec, launcher(workers))
    assert_same_course(spec, unbroken)


@pytest.mark.soak
def test_stages_go_on_together_and_back(make_spec: SpecMaker, unbroken: TrainingSpec) -> None:
    spec = make_spec("stages", **STAGES, audit_rows=True)
    kill_spread_and_whole(spec, 2, then=4)
    assert_same_course(spec, unbroken)


@pytest.mark.soak
def test_three_stages_have_layers_norms_and_an_output_matrix_of_their_own(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    steps = {"steps": 6, "recipe": "pretraining", "precision": "float32"}
    alone = make_spec("alone", **steps)
    stages = make_spec("stages", **steps, pipeline_parallel=3, device_batch_size=1)
    train_with_all_kinds_of_weights(tmp_path / "model", alone, stages, 3)
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

    decoder = Decoder(DecoderShape.from_config(AutoConfig.from_pretrained(base_model)))
    layers = len(decoder.layers)
    workers = Workers(0, layers + 1, torch.device("cpu"), pipeline_parallel=layers + 1)
    with pytest.raises(UserError, match=f"has {layers} layers. Set it to {layers} or less"):
        StageModel(TrainableModel(decoder), decoder, workers, "float32")
