"""A training run survives whatever ends it."""

import pickle
import signal
from pathlib import Path
from typing import Any

import pytest

from artifacts.program.entry import INTERRUPTED
from recipes.spec import TrainingSpec, read_metrics
from tests.recipes.conftest import (
    SpecMaker,
    course,
    exported,
    finish,
    kill_at,
    launcher,
    on_model,
    run_well,
    same,
    start,
    stop_here,
    train_here,
    wait_for_step,
)
from tests.recipes.model.architectures import tiny_kind


@pytest.mark.fault(
    "checkpoint",
    "training killed twice",
    sees="the process is gone",
    then="resumes with exactly the same losses and weights",
)
def test_killed_run_goes_on_with_the_very_same_losses(
    make_spec: SpecMaker, unbroken: TrainingSpec
) -> None:
    spec = make_spec("killed", steps=30, checkpointing={"every_steps": 6})
    for step in (9, 20):
        kill_at(spec, step)

    assert "Going on from the checkpoint of step" in run_well(spec)
    assert course(spec) == course(unbroken)
    assert same(exported(spec), exported(unbroken))


@pytest.mark.fault(
    "checkpoint",
    "SIGTERM",
    sees="at which step the state was saved; exit code 75",
    then="resumes from that step",
)
def test_sigterm_through_the_launcher_saves_and_asks_to_be_started_again(
    make_spec: SpecMaker, unbroken: TrainingSpec
) -> None:
    # Validated after every step, so that it lasts some seconds after the first.
    often = {"every_steps": 1}
    spec = make_spec("terminated", steps=30, validation=often, checkpointing={"every_steps": 30})
    process = start(spec, launcher(1))
    wait_for_step(spec, process, 1)
    process.send_signal(signal.SIGTERM)

    code, output = finish(process)

    assert code == INTERRUPTED, output
    assert "SIGTERM received: saved at step" in output
    stopped_at = read_metrics(Path(spec.run_folder))[-1]["step"]
    lines: list[str] = []
    train_here(spec, lines.append)
    assert any(f"Going on from the checkpoint of step {stopped_at}" in line for line in lines)
    assert course(spec) == course(unbroken)


class Harm:
    """A pickle that makes a file as it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


@pytest.mark.fault(
    "checkpoint",
    "program in place of a checkpoint's pickled metadata",
    sees="that the checkpoint is damaged",
    then="it is not read; an earlier one is",
)
def test_what_is_unpickled_is_what_the_run_wrote(make_spec: SpecMaker, tmp_path: Path) -> None:
    """torch unpickles what describes the tensors, so it is compared with its checksum before."""
    often = {"every_steps": 2}
    spec = make_spec("harmed", steps=6, validation=often, checkpointing=often)
    stop_here(spec, 4)
    newest = Path(spec.run_folder) / "step-4"
    metadata, harm = newest / ".metadata", tmp_path / "harm"
    size = metadata.stat().st_size
    metadata.write_bytes(pickle.dumps(Harm(harm)).ljust(size, b"\0")[:size])
    lines: list[str] = []
    train_here(spec, lines.append)
    assert not harm.exists()
    assert any("step 4 is damaged" in line for line in lines)
    assert any("Going on from the checkpoint of step 2" in line for line in lines)


@pytest.mark.parametrize("kind", ["phi", "big_bird"])
def test_a_model_of_transformers_goes_on_exactly(
    make_spec: SpecMaker, base_model: Path, tmp_path: Path, kind: str
) -> None:
    """Phi's head has a bias; BigBird has a pooler, for which no optimizer state exists."""
    folder = tiny_kind(kind, base_model, tmp_path / "model")
    whole, stopped = (
        on_model(make_spec(name, steps=6, validation={"every_steps": 2}), folder)
        for name in ("whole", "stopped")
    )
    train_here(whole)

    stop_here(stopped, 2)
    train_here(stopped)

    assert course(stopped) == course(whole)
    assert same(exported(stopped), exported(whole))
