"""What a step reckons with is how many processes run; one, two and four of them train one model."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from recipes.settings import training_settings
from recipes.spec import TrainingSpec
from tests.recipes.conftest import (
    PATIENCE_SECONDS,
    REPOSITORY,
    SpecMaker,
    course,
    launcher,
    planned,
    run,
    train_here,
)

TORCHTUNE = {
    "recipe": "torchtune",
    "run": "full_finetune_single_device",
    "config": "llama3_2/1B_full",
    "overrides": {"compile": False, "optimizer_in_bwd": False, "dtype": "fp32"},
}
SAME_WEIGHTS = {"float32": 1e-5, "bfloat16": 1e-2}
"""How far the weights of two trainings may lie apart, as a share of the way that each has gone."""


@pytest.mark.fault(
    "checkpoint",
    "{started} training processes started where {plan} were planned ({settings[recipe]})",
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
    spec = planned(made, plan)
    path = Path(spec.run_folder).parent / "planned.json"
    spec.write(path)
    ended = subprocess.run(
        [*launcher(started), str(path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 1, output
    assert f"planned for {plan} training process(es), but {started} were started" in output
    assert f"set `checkpoint.placement.workers` to {started}" in output
    assert "Traceback" not in output
    assert [path.name for path in Path(spec.run_folder).iterdir()] == ["run.lock"]


def test_torchtune_counts_the_rows_of_a_step_by_the_processes() -> None:
    settings = training_settings(TORCHTUNE | {"run": "full_finetune_distributed"})
    eight = settings.placed(8)
    assert eight.budget.global_batch_size == 8 * settings.budget.global_batch_size
    assert eight.placed(1) == settings.placed(1)


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.soak)])
def test_one_two_and_four_processes_train_one_model(make_spec: SpecMaker, precision: Any) -> None:
    alone, *others = (make_spec(f"by{n}", precision=precision) for n in (1, 2, 4))
    train_here(alone)
    for spec, workers in zip(others, (2, 4), strict=True):
        code, output = run(spec, launcher(workers))
        assert code == 0, output
        # The first step starts from the same weights, so that nothing but rounding is another.
        loss, norm, _ = course(alone)[0]
        assert course(spec)[0][0] == pytest.approx(loss, rel=1e-5)
        assert course(spec)[0][1] == pytest.approx(norm, rel=1e-3)
        assert distance(spec, alone) < SAME_WEIGHTS[precision] * way(alone)


def distance(one: TrainingSpec, other: TrainingSpec) -> float:
    return apart(Path(one.export_folder), Path(other.export_folder))


def way(spec: TrainingSpec) -> float:
    return apart(Path(spec.export_folder), Path(spec.base_model_folder))


def apart(one: Path, other: Path) -> float:
    first, second = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    return float(sum((first[name] - second[name]).square().sum() for name in first) ** 0.5)
