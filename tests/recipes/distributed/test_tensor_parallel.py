"""Matrices split over workers compute what whole ones do."""

from pathlib import Path

import pytest
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig

from artifacts.errors import UserError
from recipes.distributed.sharding import split_matrices
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder import Decoder, DecoderShape
from recipes.spec import TrainingSpec
from tests.recipes.conftest import SpecMaker, fake_group, kill_at, launcher, losses, run_well
from tests.recipes.distributed.one_course import (
    assert_same_course,
    kill_spread_and_whole,
    train_with_all_kinds_of_weights,
)

SPLIT = {
    "steps": 30,
    "checkpointing": {"every_steps": 6},
    "tensor_parallel": 2,
    "device_batch_size": 2,
    "activation_checkpointing": True,
}


@pytest.mark.soak
def test_split_matrices_go_on_whole_and_back(make_spec: SpecMaker, unbroken: TrainingSpec) -> None:
    spec = make_spec("split", **SPLIT)
    kill_spread_and_whole(spec, 2, then=2)
    assert_same_course(spec, unbroken)


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
    assert "Going on from the checkpoint of step" in run_well(spec, launcher(4))
    assert losses(spec) == pytest.approx(losses(unbroken), rel=1e-5)


@pytest.mark.soak
def test_head_norms_biases_and_an_output_matrix_of_its_own_are_split_too(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    steps = {"steps": 6, "recipe": "pretraining", "precision": "float32"}
    alone, split = make_spec("alone", **steps), make_spec("split", **steps, tensor_parallel=2)
    train_with_all_kinds_of_weights(tmp_path / "model", alone, split, 2)
    assert_same_course(split, alone)


def test_heads_that_cannot_be_divided_are_refused(base_model: Path) -> None:
    config = AutoConfig.from_pretrained(base_model)
    model = TrainableModel(Decoder(DecoderShape.from_config(config)))
    refused = pytest.raises(UserError, match=r"tensor_parallel. is 3, which does not divide .* 4")
    with fake_group(3), refused:
        split_matrices(model, init_device_mesh("cpu", (3,)))
