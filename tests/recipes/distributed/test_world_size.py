"""What a step reckons with is how many processes run; one, two, four and eight train one model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from artifacts.errors import UserError
from artifacts.program.lifetime import Interruption
from recipes.distributed.workers import Workers, join_workers
from recipes.settings import training_settings
from recipes.training.trainer import train
from tests.listening import outside_loopback, run_watched
from tests.recipes.conftest import SpecMaker, course, finish, forked_workers, planned, train_here

TORCHTUNE = {
    "recipe": "torchtune",
    "run": "full_finetune_single_device",
    "config": "llama3_2/1B_full",
    "overrides": {"compile": False, "optimizer_in_bwd": False, "dtype": "fp32"},
}
SAME_LOSS = {"float32": 1e-5, "bfloat16": 1e-3}
"""Relative difference of a step's loss, over the whole course; later ones start from weights that
are rounded otherwise."""
SAME_WEIGHTS = {"float32": 1e-5, "bfloat16": 1e-2}
"""How far the weights of two trainings may lie apart, as a share of the way that each has gone."""


@pytest.mark.fault(
    "checkpoint",
    "training processes: {started} started, {plan} planned ({settings[recipe]})",
    sees="both numbers, and the setting to change",
    then="nothing is trained",
)
@pytest.mark.parametrize(
    ("plan", "started", "settings"),
    [
        (1, 2, {"recipe": "continued_pretraining"}),
        (2, 1, {"recipe": "continued_pretraining"}),
        (1, 2, TORCHTUNE),
    ],
)
def test_another_number_of_processes_than_planned_ends_the_run_before_its_first_step(
    make_spec: SpecMaker, plan: int, started: int, settings: dict[str, Any]
) -> None:
    made = make_spec("planned").model_copy(update={"training": training_settings(settings)})
    spec, workers = planned(made, plan), Workers(0, started, torch.device("cpu"))
    with pytest.raises(UserError) as refusal:
        train(spec, workers, Interruption(), lambda line: None)
    told = str(refusal.value)
    assert f"planned for {plan} training process(es), but {started} were started" in told
    assert f"set `checkpoint.placement.workers` to {started}" in told
    assert not Path(spec.run_folder).exists()


def test_more_processes_than_gpus_are_refused_before_they_meet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "8")
    with pytest.raises(UserError, match=r"8 processes .* has 4\. Set .*workers` to at most 4"):
        join_workers()


def test_torchtune_counts_the_rows_of_a_step_by_the_processes() -> None:
    settings = training_settings(TORCHTUNE | {"run": "full_finetune_distributed"})
    eight = settings.placed(8)
    assert eight.budget.global_batch_size == 8 * settings.budget.global_batch_size
    assert eight.placed(1) == settings.placed(1)


@pytest.mark.parametrize(
    ("count", "precision"),
    [
        (2, "float32"),
        *(
            pytest.param(*placed, marks=pytest.mark.soak)
            for placed in ((4, "float32"), (8, "float32"), (2, "bfloat16"), (4, "bfloat16"))
        ),
    ],
)
def test_several_processes_train_the_model_of_one_and_are_heard_of_on_loopback_alone(
    make_spec: SpecMaker, count: int, precision: Any
) -> None:
    alone, spec = (
        make_spec(f"by{n}", precision=precision, global_batch_size=8) for n in (1, count)
    )
    train_here(alone)
    with forked_workers(spec, count) as workers:
        listened = run_watched(*workers)
        codes = [finish(worker) for worker in workers]
    assert [code for code, _ in codes] == [0] * count, codes
    assert listened and outside_loopback(listened) == set()
    (expected, norms, rates), (ours, our_norms, our_rates) = (
        zip(*course(one), strict=True) for one in (alone, spec)
    )
    assert ours == pytest.approx(expected, rel=SAME_LOSS[precision]) and our_rates == rates
    # The first step starts from the same weights, so that nothing but rounding is another.
    assert ours[0] == pytest.approx(expected[0], rel=1e-5)
    assert our_norms[0] == pytest.approx(norms[0], rel=1e-3)
    way = apart(alone.export_folder, alone.base_model_folder)
    assert apart(spec.export_folder, alone.export_folder) < SAME_WEIGHTS[precision] * way


def apart(one: str, other: str) -> float:
    first, second = (load_file(f"{folder}/model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return float(sum((first[name] - second[name]).square().sum() for name in first) ** 0.5)
