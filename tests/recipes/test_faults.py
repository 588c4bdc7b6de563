"""Faults in the middle of a run: each costs at most the steps since the last checkpoint."""

import resource
import shutil
from pathlib import Path

import pytest
import torch

from artifacts.errors import UserError
from recipes.checkpointing.checkpoint import TrainState
from recipes.spec import TrainingSpec
from tests.recipes.conftest import (
    SpecMaker,
    course,
    finish,
    kill_at,
    on_model,
    start,
    train_here,
    wait_for_step,
)
from tests.tiny import change_weights


@pytest.mark.fault(
    "checkpoint",
    "training killed in the middle of a save",
    sees="the process is gone",
    then="the save is discarded; training resumes with the losses of an uninterrupted run",
)
def test_a_kill_in_the_middle_of_a_save_costs_nothing_but_that_save(
    make_spec: SpecMaker, unbroken: TrainingSpec
) -> None:
    spec = make_spec("saving", steps=30, checkpointing={"every_steps": 1}, in_background="always")
    for step in (5, 17):
        kill_at(spec, step)
    train_here(spec)
    assert course(spec) == course(unbroken)


@pytest.mark.fault(
    "checkpoint",
    "no space left while saving, `checkpointing.in_background: {background}`",
    sees="the step and the folder, and that earlier checkpoints are intact",
    then="resumes from them, with the losses of an uninterrupted run",
)
@pytest.mark.parametrize("background", [pytest.param("never", marks=pytest.mark.soak), "always"])
def test_a_full_disk_ends_the_run_with_its_checkpoints_whole(
    make_spec: SpecMaker, unbroken: TrainingSpec, background: str
) -> None:
    spec = make_spec("full", steps=30, checkpointing={"every_steps": 6}, in_background=background)
    kill_at(spec, 8)
    process = start(spec)
    wait_for_step(spec, process, 7)
    # No file may grow past 600 kB from now on, as on a disk that is nearly full.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (600_000, 600_000))
    code, output = finish(process)

    assert code == 1
    assert "No space left on the disk for the checkpoint of step" in output
    assert "Traceback" not in output
    train_here(spec)
    assert course(spec) == course(unbroken)


@pytest.mark.fault(
    "checkpoint",
    "starting model computes values that are not numbers",
    sees="that its weights are damaged or too large for the precision",
    then="nothing is saved",
)
def test_a_model_that_computes_no_number_is_refused_and_nothing_is_saved(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    spec = make_spec("nothing", steps=4)
    folder = change_weights(
        Path(spec.base_model_folder),
        tmp_path / "model",
        lambda weights: weights["model.norm.weight"].fill_(torch.nan),
    )
    with pytest.raises(UserError, match="starting model's loss on the validation text"):
        train_here(on_model(spec, folder))
    assert not list(Path(spec.run_folder).glob("step-*"))


@pytest.mark.fault(
    "checkpoint",
    "training diverges",
    sees="after which step, and which settings to change",
    then="every checkpoint that was saved can be loaded",
)
def test_what_is_saved_can_be_loaded_and_a_divergence_is_dated() -> None:
    state = TrainState()
    state.add_validation(0, 2.5)
    state.add_validation(8, 2.25)
    assert state.diverged is None
    state.add_validation(16, float("nan"))
    assert state.diverged and "stopped at step 16: " in state.diverged
    assert "since some step after 8." in state.diverged
    with pytest.raises(UserError, match="starting model's loss"):
        TrainState().add_validation(0, float("nan"))
    assert TrainState.model_validate_json(state.model_dump_json()) == state


@pytest.mark.fault(
    "checkpoint",
    "metrics deleted in the middle of a run",
    sees="nothing",
    then="the run ends with the same figures",
)
def test_a_run_that_lost_its_metrics_ends_all_the_same(
    make_spec: SpecMaker, unbroken: TrainingSpec
) -> None:
    spec = make_spec("lost", steps=30, checkpointing={"every_steps": 6})
    kill_at(spec, 27)
    for path in Path(spec.run_folder).glob("step-*"):
        if path.name != "step-24":
            shutil.rmtree(path)
    (Path(spec.run_folder) / "metrics.jsonl").unlink()
    result = train_here(spec)
    assert result.final_loss == course(unbroken)[-1][0]
    assert result.tokens_per_second > 0


@pytest.mark.fault(
    "checkpoint",
    "a run's {name} damaged",
    sees="the file, and what is lost",
    then="resumes from its checkpoints, which are intact",
)
@pytest.mark.parametrize("name", ["result.json", "metrics.jsonl"])
def test_a_damaged_account_of_a_run_does_not_stop_it(make_spec: SpecMaker, name: str) -> None:
    spec = make_spec(f"damaged-{name}", steps=4, checkpointing={"every_steps": 2})
    before = train_here(spec)
    path = Path(spec.run_folder) / name
    path.write_bytes(path.read_bytes()[:40] + b"\xff}\n")
    if name == "metrics.jsonl":
        (Path(spec.run_folder) / "result.json").unlink()
    lines: list[str] = []
    again = train_here(spec, lines.append)
    assert any(f"{name} cannot be read" in line for line in lines)
    assert (again.steps, again.final_loss) == (before.steps, before.final_loss)
