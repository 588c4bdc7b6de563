"""Anything can be killed at any moment and run again."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from dagster import DagsterRunStatus

from llm_assets.cloud.spending import START_HOURS
from recipes.spec import read_metrics
from tests.conftest import ROOT, Project, make_project
from tests.faults import hung_at, killed_at
from tests.forked import ForkedProcess
from tests.llm_assets.conftest import SHARDS
from tests.llm_assets.in_process import ask, history_of
from tests.waiting import WAIT_SECONDS, wait_until

STEPS = 40
SETTINGS = {"budget": {"steps": STEPS}, "checkpointing": {"every_steps": 5}}


@pytest.fixture
def prepared(with_shards: Project) -> Project:
    """A project whose shards are made and whose training takes long enough to be killed."""
    with_shards.configure(checkpoint=SETTINGS)
    return with_shards


@pytest.fixture
def unbroken(tmp_path: Path, tiny_model_folder: Path, already_made: Project) -> Project:
    """Another project with the same shards, whose training nobody interrupts."""
    project = make_project(tmp_path / "unbroken", tiny_model_folder)
    project.adopt(already_made, *SHARDS)
    return project


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary folder of whatever a test starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    # Set by a Spark of this process, if there was one.
    for name in ("SPARK_LOCAL_DIRS", "SPARK_SUBMIT_OPTS"):
        monkeypatch.delenv(name, raising=False)
    return folder


def steps_done(project: Project) -> int:
    runs = list((project.folder / "store" / "runs").glob("*"))
    return len(read_metrics(runs[0])) if runs else 0


def training_workers(process: ForkedProcess) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "recipes.continued_pretraining" in child.cmdline()
        and "recipes.launcher.local" not in child.cmdline()
    ]


def losses(project: Project) -> list[float]:
    checkpoint = project.current("checkpoint")
    return [record["loss"] for record in read_metrics(checkpoint.path)]


def weights(project: Project) -> dict[str, str]:
    """Checksums of the trained model's weights."""
    manifest = project.current("checkpoint").manifest
    return {e.path: e.sha256 for e in manifest.files if e.path.endswith(".safetensors")}


def resumed(output: str) -> list[int]:
    """From which steps the training went on, oldest first, as its run has said."""
    return [int(step) for step in re.findall(r"Going on from .* step (\d+)", output)]


NEXT_STEP = "recipes.training.trainer:Trainer._train_next_step"
MATERIALIZE = ("dagster", "asset", "materialize", "--select", "*checkpoint")


@pytest.mark.fault(
    "checkpoint",
    "worker killed under Dagster (SIGKILL)",
    sees="the step fails",
    then="the same command resumes with the losses of an uninterrupted run",
)
def test_killed_training_goes_on_with_the_losses_of_an_unbroken_run(
    prepared: Project, unbroken: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared.configure(training={"restarts": 0})
    with monkeypatch.context() as patched:
        for name, value in killed_at(NEXT_STEP, call=13).items():
            patched.setenv(name, value)
        running = prepared.fork(*MATERIALIZE)
    assert running.wait(WAIT_SECONDS) != 0
    assert prepared.record.find_current("checkpoint") is None
    assert steps_done(prepared) == 12

    prepared.run_well(*MATERIALIZE)

    unbroken.configure(checkpoint=SETTINGS)
    assert ask(unbroken, "*checkpoint") == ""
    assert len(losses(prepared)) == STEPS
    assert losses(prepared) == losses(unbroken)


@pytest.mark.fault(
    "checkpoint",
    "a step hangs, as on a disk or a GPU that does not answer",
    sees="a log line; the stacks of the hung process are in the training's log",
    then="after `checkpoint.placement.hang_minutes`, training resumes from its newest checkpoint",
)
def test_a_training_that_hangs_is_ended_and_goes_on(
    prepared: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared.configure(checkpoint={**SETTINGS, "placement": {"hang_minutes": 0.2}})
    for name, value in hung_at(NEXT_STEP, call=25).items():
        monkeypatch.setenv(name, value)

    printed = prepared.run_well(*MATERIALIZE)

    assert resumed(printed) == [20] and len(losses(prepared)) == STEPS
    (run,) = (prepared.folder / "store" / "runs").iterdir()
    log = (run / "program.log").read_text()
    assert "Nothing was finished within 0.2 minutes (`checkpoint.placement.hang_minutes`)" in log
    assert "in _train\n" in log


@pytest.mark.parametrize("hangs", ["_build", "_export"])
def test_loading_and_writing_a_model_are_watched_too(
    hangs: str, prepared: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared.configure(
        training={"restarts": 0}, checkpoint={**SETTINGS, "placement": {"hang_minutes": 0.1}}
    )
    for name, value in hung_at(f"recipes.training.trainer:Trainer.{hangs}").items():
        monkeypatch.setenv(name, value)

    assert prepared.run(*MATERIALIZE).returncode != 0

    (run,) = (prepared.folder / "store" / "runs").iterdir()
    log = (run / "program.log").read_text()
    assert "Nothing was finished within 0.1 minutes" in log


@pytest.mark.soak
def test_a_training_goes_on_elsewhere_by_the_specification_in_its_runs_folder(
    prepared: Project,
) -> None:
    """As in a container at home, which docs/recipes.md has: that one sees the store alone."""
    prepared.configure(training={"restarts": 0})
    running = prepared.fork(*MATERIALIZE)
    wait_until(lambda: steps_done(prepared) >= 6)
    os.killpg(running.pid, signal.SIGINT)
    running.wait(WAIT_SECONDS)
    (run,) = (prepared.folder / "store" / "runs").iterdir()
    before = len(read_metrics(run))
    assert before < STEPS
    program = [sys.executable, "-m", "recipes.continued_pretraining", "--spec", run / "spec.json"]
    ended = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(read_metrics(run)) == STEPS
    printed = prepared.run_well(*MATERIALIZE)
    # From the last step on, so nothing is trained again.
    assert resumed(printed) == [STEPS] and len(losses(prepared)) == STEPS


WEEK = 7 * 24 * 12
"""Steps of five minutes."""
SAVED_EVERY = 3
"""A GPU's checkpoints come every quarter of an hour."""
LIFE = 3 * 12 + SAVED_EVERY - 1
"""Steps until a machine is taken: three hours, and then just before the next checkpoint."""
MADE_AGAIN = START_HOURS * 12
"""Steps that pass until there is another machine, its image pulled and the model read."""
WEEK_SECONDS = 3_600


@pytest.mark.soak
@pytest.mark.fault(
    "checkpoint",
    "training killed 38 steps after every start, in 2,016 steps (a week at 5 min each)",
    sees="a log line each time",
    then="at least 90% of the estimated time is useful; the weights are bit-identical to those of "
    "an uninterrupted run",
)
def test_a_week_of_machines_that_are_taken_costs_a_tenth_of_their_time(
    prepared: Project, unbroken: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"budget": {"steps": WEEK}, "checkpointing": {"every_steps": SAVED_EVERY}}
    prepared.configure(checkpoint=settings)
    with monkeypatch.context() as patched:
        for name, value in killed_at(NEXT_STEP, call=LIFE + 1).items():
            patched.setenv(name, value)
        running = prepared.fork(*MATERIALIZE)
    code, output = running.wait(WEEK_SECONDS), running.output.read_text()
    assert code == 0, output

    starts = resumed(output)
    assert starts == list(range(36, WEEK, 36))
    steps = len(starts) * LIFE + WEEK - starts[-1]
    assert WEEK / (steps + MADE_AGAIN * len(starts)) >= 0.9
    unbroken.configure(checkpoint=settings)
    assert ask(unbroken, "*checkpoint") == ""
    assert losses(prepared) == losses(unbroken)
    assert weights(prepared) == weights(unbroken)


# That training ends with whoever waits for it, `tests/recipes/test_lone_trainer.py` holds.
@pytest.mark.soak
@pytest.mark.fault(
    "checkpoint",
    "Dagster killed (SIGKILL)",
    sees="the run's process is gone",
    then="the workers end with it; the next run resumes, and removes its temporary files",
)
def test_a_killed_orchestrator_leaves_no_training_behind_and_the_next_run_goes_on(
    prepared: Project, temporary: Path
) -> None:
    running = prepared.fork(*MATERIALIZE)
    wait_until(lambda: bool(training_workers(running)))
    workers = training_workers(running)
    wait_until(lambda: steps_done(prepared) >= 1)
    os.kill(running.pid, signal.SIGKILL)
    running.wait(WAIT_SECONDS)
    wait_until(lambda: not any(worker.is_running() for worker in workers))

    left = set(temporary.iterdir())
    assert left
    prepared.run_well(*MATERIALIZE)
    assert len(losses(prepared)) == STEPS
    assert not left & set(temporary.iterdir())


@pytest.mark.fault(
    "clean_corpus",
    "run killed together with its Java (SIGKILL)",
    sees="the run's process is gone",
    then="the next stage that runs removes its temporary files",
)
@pytest.mark.soak
def test_a_killed_spark_leaves_nothing_under_the_temporary_folder(
    project: Project, temporary: Path
) -> None:
    running = project.fork("dagster", "asset", "materialize", "--select", "*clean_corpus")
    wait_until(
        lambda: bool(list(temporary.rglob("blockmgr-*"))),
        told=(project.folder / "output.txt").read_text,
    )
    os.killpg(running.pid, signal.SIGKILL)
    running.wait(WAIT_SECONDS)
    left = set(temporary.iterdir())
    assert left
    project.run_well("dagster", "asset", "materialize", "--select", "raw_corpus")
    assert not left & set(temporary.iterdir())


@pytest.mark.fault(
    "checkpoint",
    "Ctrl-C in `llm-assets run`",
    sees="`Interrupted. Nothing finished is lost`, and that the same command continues",
    then="the state is saved; the same command resumes",
)
@pytest.mark.soak
def test_ctrl_c_stops_the_run_and_the_same_command_goes_on(prepared: Project) -> None:
    project = prepared
    running = project.fork("llm-assets", "run")
    wait_until(lambda: steps_done(project) >= 3)
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(WAIT_SECONDS) == 130
    said = (project.folder / "output.txt").read_text()
    assert "Interrupted. Nothing finished is lost" in said and "Traceback" not in said
    # Not failed: nobody is told of what somebody did on purpose.
    with history_of(project) as instance:
        assert [run.status for run in instance.get_runs()] == [DagsterRunStatus.CANCELED]

    project.run_well("llm-assets", "run")
    assert len(losses(project)) == STEPS
