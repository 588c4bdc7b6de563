"""One run has one trainer, and a trainer does not outlive the one who waits for it."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from artifacts.errors import UserError
from artifacts.leases import local_lease
from artifacts.program.entry import INTERRUPTED, Interrupted
from artifacts.program.lifetime import PARENT_VARIABLE, Interruption
from recipes import continued_pretraining
from recipes.spec import TrainingSpec, command, read_metrics
from tests.forked import ForkedProcess
from tests.recipes.conftest import (
    REPOSITORY,
    SpecMaker,
    finish,
    forked_workers,
    settings_of,
    start,
    train_here,
    train_together,
    wait_for_step,
)
from tests.waiting import wait_until


@pytest.mark.fault(
    "checkpoint",
    "two trainers of one run, the first one frozen",
    sees="that it waits, and for whom",
    then="the second finds the run complete",
)
def test_a_second_trainer_waits_and_then_finds_the_run_complete(make_spec: SpecMaker) -> None:
    spec = make_spec(steps=120)
    first = start(spec)
    wait_for_step(spec, first, 2)
    first.send_signal(signal.SIGSTOP)
    second = start(spec)
    wait_for_words("Waiting: another trainer works on", second)
    first.send_signal(signal.SIGCONT)

    (first_code, first_output), (second_code, second_output) = finish(first), finish(second)

    assert (first_code, second_code) == (0, 0), first_output + second_output
    assert "is complete already: 120 steps" in second_output
    assert [line["step"] for line in read_metrics(Path(spec.run_folder))] == list(range(1, 121))


def test_a_signal_to_one_of_the_workers_that_wait_for_a_trainer_ends_all(
    make_spec: SpecMaker,
) -> None:
    spec = make_spec(steps=2)
    with (
        local_lease(Path(spec.run_folder) / "run.lock"),
        forked_workers(spec, 2) as (first, second),
    ):
        wait_for_words("Waiting: another trainer works on", first)
        second.send_signal(signal.SIGTERM)
        (code, output), (other_code, _) = finish(first), finish(second)
    assert (code, other_code) == (INTERRUPTED, INTERRUPTED)
    assert "Another worker was told to end: nothing was trained. Start the same" in output
    train_together(spec, 2)


def test_one_process_takes_no_hardware_while_it_waits_for_a_trainer(
    make_spec: SpecMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes cannot have the chips of a TPU at once."""
    spec, told = make_spec(steps=2), SimpleNamespace(requested=True, signal_name="SIGTERM")
    monkeypatch.setattr("recipes.distributed.workers.join_workers", pytest.fail)
    lines: list[str] = []
    with local_lease(Path(spec.run_folder) / "run.lock"), pytest.raises(Interrupted):
        continued_pretraining._train(spec, cast(Interruption, told), lines.append)
    assert "Waiting: another trainer works on" in lines[0]
    assert lines[1].startswith("SIGTERM received: nothing was trained. Start the same command")


def wait_for_words(words: str, process: ForkedProcess) -> None:
    wait_until(lambda: process.output.exists() and words in process.output.read_text())


def start_through_a_parent(spec: TrainingSpec) -> subprocess.Popen[bytes]:
    path = Path(spec.run_folder).parent / "spec.json"
    spec.write(path)
    code = (
        f"import os, subprocess, time; os.environ['{PARENT_VARIABLE}'] = str(os.getpid()); "
        f"subprocess.Popen({command(path, 1)!r}); time.sleep(600)"
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)


@pytest.mark.fault(
    "checkpoint",
    "parent of a training killed",
    sees="the process is gone",
    then="the training saves and ends; the next run resumes it",
)
def test_killing_the_parent_makes_the_training_save_and_end(make_spec: SpecMaker) -> None:
    spec = make_spec(steps=3000, checkpointing={"every_steps": 3000})
    parent = start_through_a_parent(spec)
    wait_until(lambda: read_metrics(Path(spec.run_folder)))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()

    wait_until(lambda: any(Path(spec.run_folder).glob("step-*/manifest.json")))
    process = start(spec)
    wait_for_step(spec, process, len(read_metrics(Path(spec.run_folder))) + 1)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)

    assert code == 75, output
    assert "Going on from the checkpoint of step" in output


@pytest.mark.fault(
    "checkpoint",
    "settings changed in the middle of a run",
    sees="each setting with both values",
    then="nothing is trained",
)
def test_changed_settings_are_refused_saying_which(make_spec: SpecMaker) -> None:
    spec = make_spec(steps=4)
    train_here(spec)
    changed = settings_of(steps=4, learning_rate=0.5, precision="float32", seed=7)
    shutil.rmtree(spec.export_folder)

    with pytest.raises(
        UserError, match=r"settings.optimizer.learning_rate: 0.003 -> 0.5; settings.seed: 0 -> 7"
    ):
        train_here(spec.model_copy(update={"training": changed}))
