"""Several workers, in real processes, train what one trains."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from artifacts.errors import UserError
from recipes.data.reader import DataOrder
from recipes.distributed.workers import join_workers
from recipes.spec import TrainingSpec
from tests.recipes.conftest import (
    PATIENCE_SECONDS,
    REPOSITORY,
    SpecMaker,
    course,
    finish,
    kill_at,
    launcher,
    losses,
    rows_trained_on,
    run_well,
    start,
    train_here,
    train_together,
    wait_for_step,
    worker_processes,
)


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("WORLD_SIZE", "0", "WORLD_SIZE has to be a number from 1, not '0'"),
        ("WORLD_SIZE", "two", "WORLD_SIZE has to be a number from 1, not 'two'"),
        ("LOCAL_RANK", "-1", "LOCAL_RANK has to be a number from 0, not '-1'"),
        ("WORLD_SIZE", "2", ".*variable RANK expected, but not set"),
    ],
)
def test_surroundings_that_no_launcher_makes_are_refused(
    name: str, value: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"{fault}. .*recipes.launcher.local, which sets it"):
        join_workers()


@pytest.mark.soak
@pytest.mark.fault(
    "checkpoint",
    "one of two workers killed",
    sees="the signal, and that the same command resumes",
    then="resumes with one or two workers; each sample is used once",
)
def test_two_one_two_workers_across_deaths_see_each_sample_once(
    make_spec: SpecMaker, unbroken: TrainingSpec
) -> None:
    spec = make_spec("changing", steps=30, checkpointing={"every_steps": 6}, audit_rows=True)
    process = start(spec, launcher(2))
    wait_for_step(spec, process, 7)
    workers = worker_processes(process)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    code, output = finish(process)
    assert code == 1, output
    assert "killed by signal 9. Start the same command again" in output
    assert output.count("A worker of this training ended") == 1 and "Traceback" not in output

    kill_at(spec, 16, launcher(1))
    assert "Going on from the checkpoint of step" in run_well(spec, launcher(2))

    rows = rows_trained_on(spec)
    seen = [row for step in sorted(rows) for row in rows[step]]
    assert sorted(rows) == list(range(1, 31))
    assert seen == DataOrder.of(spec).rows(0, 30 * 4).tolist()
    assert len(set(seen)) == len(seen) == 120
    assert rows == rows_trained_on(unbroken)
    ours, theirs = course(spec), course(unbroken)
    assert [loss for loss, _, _ in ours] == pytest.approx([x[0] for x in theirs], rel=1e-5)
    assert [norm for _, norm, _ in ours] == pytest.approx([x[1] for x in theirs], rel=1e-4)


def test_replicas_accumulation_and_recomputation_take_the_same_course(
    make_spec: SpecMaker, unbroken: TrainingSpec
) -> None:
    placement = {"replicas": 2, "device_batch_size": 1, "activation_checkpointing": True}
    spec = make_spec("placed", steps=30, **placement)
    train_together(spec, 2)
    assert losses(spec) == pytest.approx(losses(unbroken), rel=1e-5)


@pytest.mark.soak
def test_muon_takes_the_same_course_on_split_matrices(make_spec: SpecMaker) -> None:
    muon = {
        "steps": 12,
        "optimizer": {"name": "muon"},
        "learning_rate": 1e-2,
        "checkpointing": {"every_steps": 4},
    }
    alone, split = make_spec("alone", **muon), make_spec("split", **muon)
    train_here(alone)
    kill_at(split, 5, launcher(2))
    assert "Going on from the checkpoint of step" in run_well(split, launcher(2))
    # The update is computed in bfloat16, which rounds another order of sums visibly.
    assert losses(split) == pytest.approx(losses(alone), rel=2e-3)


@pytest.mark.soak
@pytest.mark.fault(
    "checkpoint",
    "one worker hashes or writes files for longer than NCCL's timeout",
    sees="nothing",
    then="the others wait for it on the host, then continue",
)
def test_workers_wait_for_the_first_one_longer_than_the_group_that_trains_allows(
    tmp_path: Path,
) -> None:
    program = [sys.executable, "-m", "recipes.launcher.local", "--workers=2", "--"]
    subprocess.run(
        [*program, "-m", "tests.recipes.distributed.outlast_limit", str(tmp_path)],
        cwd=REPOSITORY,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["limit", "met-0", "met-1"]
