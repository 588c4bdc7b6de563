"""Faults in the middle of a run: each costs at most the steps since the last checkpoint."""

import json
import os
import resource
import shutil
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from artifacts.errors import UserError
from artifacts.program.entry import Interrupted
from artifacts.shards.shard_set import ShardSet
from recipes.checkpointing.train_state import TrainState
from recipes.data.order import DataOrder
from recipes.data.trained import TRAINED_NAME
from recipes.optimization.gradient_guard import GradientGuard
from recipes.spec import TrainingSpec, read_metrics
from tests.recipes.conftest import (
    SpecMaker,
    course,
    finish,
    kill_at,
    start,
    train_here,
    wait_for_step,
)


@pytest.mark.fault(
    "checkpoint",
    "killed in the middle of a save",
    sees="the process is gone",
    then="the save is void; losses as unbroken",
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
    "flipped byte in the newest resumable state",
    sees="the step that is damaged",
    then="the state before is taken; losses as unbroken",
)
def test_a_flipped_byte_in_the_newest_checkpoint_is_named_and_the_one_before_taken(
    make_spec: SpecMaker, unbroken: TrainingSpec
) -> None:
    spec = make_spec("flipped", steps=30, checkpointing={"every_steps": 6})
    kill_at(spec, 14)
    data = Path(spec.run_folder) / "step-12" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 4
    data.write_bytes(content)

    lines: list[str] = []
    train_here(spec, lines.append)

    output = "\n".join(lines)
    assert "The checkpoint of step 12 is damaged" in output
    assert "Going on from the checkpoint of step 6" in output
    assert course(spec) == course(unbroken)


@pytest.mark.fault(
    "checkpoint",
    "no space left while saving in the background: {background}",
    sees="step and folder; the checkpoints before are whole",
    then="goes on from them; losses as unbroken",
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


@pytest.fixture
def poisoned(make_spec: SpecMaker, tmp_path: Path) -> TrainingSpec:
    """A run in which one token's embedding is not a number."""
    spec = make_spec("poisoned", steps=30, stop_after_skips=8)
    folder = tmp_path / "model"
    folder.mkdir()
    for path in Path(spec.base_model_folder).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embeddings.clone()
    embeddings[_rare_token(spec)] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return spec.model_copy(update={"base_model_folder": str(folder)})


def _rare_token(spec: TrainingSpec) -> int:
    """A token of a few of the run's batches and of no validation row."""
    train = ShardSet(Path(spec.shards_folder), spec.shards, "train")
    validation = ShardSet(Path(spec.shards_folder), spec.shards, "validation")
    validated = {int(token) for tokens, _ in validation for token in tokens}
    order = DataOrder.of(spec)
    batches = [
        {int(token) for row in order.rows(4 * step, 4) for token in train[row][0]}
        for step in range(30)
    ]
    counts = {
        token: sum(token in batch for batch in batches)
        for token in set().union(*batches) - validated
    }
    return max(counts, key=lambda token: (counts[token] <= 5, counts[token]))


@pytest.mark.fault(
    "checkpoint",
    "a batch whose gradient is not a number",
    sees="the step, and that it was skipped",
    then="weights stay as they were; training goes on and can be resumed",
)
def test_a_batch_that_is_not_a_number_is_skipped_and_counted(poisoned: TrainingSpec) -> None:
    spec = poisoned
    lines: list[str] = []
    result = train_here(spec, lines.append)
    output = "\n".join(lines)
    history = read_metrics(Path(spec.run_folder))
    skipped = [line["step"] for line in history if line["skipped"]]
    assert result.skipped_steps == len(skipped) > 0
    trained = pq.read_table(f"{poisoned.run_folder}/{TRAINED_NAME}")["step"].to_pylist()
    assert set(trained) == set(range(1, result.steps + 1)) - set(skipped)
    for step in skipped:
        assert f"step {step} was skipped: a gradient that is not finite" in output
    assert result.validation["end"] < result.validation["start"]


def test_a_run_saved_at_a_skipped_step_goes_on_from_it(
    poisoned: TrainingSpec, tmp_path: Path
) -> None:
    whole = poisoned.model_copy(update={"run_folder": str(tmp_path / "whole")})
    train_here(whole)

    def stop_at_the_first_skipped_step(line: str) -> None:
        if "(1 skipped so far)" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train_here(poisoned, stop_at_the_first_skipped_step)
    lines: list[str] = []
    train_here(poisoned, lines.append)

    assert any(line.startswith("Going on from the checkpoint of step") for line in lines)
    assert repr(course(poisoned)) == repr(course(whole)), "not a number is not equal to itself"


@pytest.mark.fault(
    "checkpoint",
    "gradients not a number step after step",
    sees="since which step, and the settings",
    then="ends with the weights from before, which the gate rejects",
)
def test_too_many_skipped_steps_in_a_row_are_enough() -> None:
    guard = GradientGuard()
    for step in range(20):
        guard.accept(1.0 + step / 100)
    assert guard.largest_norm(10.0) == pytest.approx(10.95)
    assert "far above the recent" in guard.skip(21, 50.0, stop_after=3)[0]
    assert not guard.skip(22, float("nan"), stop_after=3)[1]
    why, is_over = guard.skip(23, float("nan"), stop_after=3)
    assert is_over and "at step 23: since step 21 every step had" in why


def test_a_training_that_diverged_ends_with_a_model_for_the_gate_and_the_reason(
    make_spec: SpecMaker,
) -> None:
    spec = make_spec("diverged", steps=30, skip_gradient_above=1.01, stop_after_skips=1)
    result = train_here(spec)
    assert result.diverged and "every step had a gradient norm of" in result.diverged
    assert 16 < result.steps < 30
    assert (Path(spec.export_folder) / "model.safetensors").exists()
    assert train_here(spec) == result, "it is finished"


@pytest.mark.fault(
    "checkpoint",
    "starting model computes no number",
    sees="that its weights are damaged or too large for the precision",
    then="nothing is saved",
)
def test_a_model_that_computes_no_number_is_refused_and_nothing_is_saved(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    spec = make_spec("nothing", steps=4)
    folder = Path(shutil.copytree(spec.base_model_folder, tmp_path / "model"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][:] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="starting model's loss on the validation text"):
        train_here(spec.model_copy(update={"base_model_folder": str(folder)}))
    assert not list(Path(spec.run_folder).glob("step-*"))


@pytest.mark.fault(
    "checkpoint",
    "training diverges",
    sees="after which step, and the settings",
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
    "metrics deleted in the middle",
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
    then="goes on from its checkpoints, which are whole",
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
