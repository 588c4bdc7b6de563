"""A training run survives whatever ends it."""

import signal
from pathlib import Path

from safetensors.torch import load_file

from recipes.spec import INTERRUPTED_EXIT_CODE, TrainingSpec, read_metrics, read_result
from tests.recipes.conftest import (
    SpecMaker,
    course,
    finish,
    kill_at,
    launcher,
    run,
    start,
    train_here,
    wait_for_step,
)


def weights_of(spec: TrainingSpec) -> dict[str, list[float]]:
    weights = load_file(Path(spec.export_folder) / "model.safetensors")
    return {name: tensor.flatten().tolist() for name, tensor in weights.items()}


def test_killed_run_goes_on_with_the_very_same_losses(
    make_spec: SpecMaker, unbroken: TrainingSpec
) -> None:
    spec = make_spec("killed", steps=30, checkpoint_every_steps=6)
    for step in (9, 20):
        kill_at(spec, step)

    code, output = run(spec)

    assert code == 0, output
    assert "Going on from the checkpoint of step" in output
    assert course(spec) == course(unbroken)
    assert weights_of(spec) == weights_of(unbroken)


def test_sigterm_through_the_launcher_saves_and_asks_to_be_started_again(
    make_spec: SpecMaker, unbroken: TrainingSpec
) -> None:
    spec = make_spec("terminated", steps=30, checkpoint_every_steps=30)
    process = start(spec, launcher(1))
    wait_for_step(spec, process, 5)
    process.send_signal(signal.SIGTERM)

    code, output = finish(process)

    assert code == INTERRUPTED_EXIT_CODE, output
    assert "SIGTERM received: saved at step" in output
    stopped_at = read_metrics(Path(spec.run_folder))[-1]["step"]
    lines: list[str] = []
    train_here(spec, lines.append)
    assert any(f"Going on from the checkpoint of step {stopped_at}" in line for line in lines)
    assert course(spec) == course(unbroken)


def test_a_complete_run_says_so_and_changes_nothing(unbroken: TrainingSpec) -> None:
    before = read_result(Path(unbroken.run_folder))

    lines: list[str] = []
    train_here(unbroken, lines.append)

    assert "is complete already: 30 steps" in lines[-1]
    assert read_result(Path(unbroken.run_folder)) == before
