"""How a run and its job may end, on each service: afterwards nothing bills, and nothing is lost."""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import grpc
import pytest

from llm_assets.pipes import RetryPolicy, tpu_vm
from llm_assets.pipes.remote_job import RemoteRun
from llm_assets.pipes.service import Phase, RemoteJob
from tests.forked import ForkedProcess
from tests.llm_assets.pipes.runner import QUICK, failure_text, log_text
from tests.llm_assets.pipes.scenes import (
    ALIKE,
    BATCH,
    DATAPROC,
    MACHINES,
    OWN,
    RESTARTED,
    SHORT,
    TPU,
    VERTEX,
    Scene,
    only,
    scene_fault,
)
from tests.waiting import WAIT_SECONDS, wait_until


def end(process: ForkedProcess, number: signal.Signals = signal.SIGTERM) -> None:
    """Cancel a run as Dagster does, most often while it waits for its job."""
    time.sleep(0.5)
    os.kill(process.pid, number)
    assert process.wait(timeout=WAIT_SECONDS) != 0


@scene_fault("program that fails because of its input", "the program's own reason", "not restarted")
def test_fault_of_the_input_is_told_and_not_tried_again(scene: Scene) -> None:
    text = failure_text(scene.run("raise:the valve is stuck"))
    assert "ValueError: the valve is stuck" in text and scene.started() == 1
    if scene.service is VERTEX:
        number = scene.jobs()[0].name.rpartition("/")[2]
        query = quote(f'resource.type="ml_job" resource.labels.job_id="{number}"', safe="")
        assert f"https://console.cloud.google.com/logs/query;query={query}" in text
    scene.ends(starts=2)


@scene_fault("{reason}", "a log line", "{scene.again}")
@pytest.mark.parametrize(
    ("reason", "step"),
    [
        ("a worker crashes without an error message", "die-until:2:1"),
        ("a worker is killed because memory ran out", "die-until:2:137"),
        ("program asked to stop (exit code 75)", "fail-until:2:75"),
    ],
)
def test_job_that_ends_without_a_fault_of_its_input_is_started_again(
    scene: Scene, reason: str, step: str
) -> None:
    result = scene.run(step)
    assert result.success == (scene.service.again == RESTARTED), reason
    assert scene.started() == (2 if result.success else 1)
    scene.ends(starts=2)


@scene_fault("the other workers lose their connection to one", "a log line", RESTARTED)
@only(*ALIKE)
def test_job_that_lost_a_worker_is_started_again(scene: Scene) -> None:
    result = scene.run("lose-until:3")
    (event,) = result.asset_materializations_for_node("figures")
    assert (event.metadata["start"].value, event.metadata["restarts"].value) == (3, 2)
    assert "was interrupted" in log_text(scene.instance, result)
    scene.ends(starts=3)


@scene_fault(
    "a worker crashes every time",
    "its exit code",
    "restarted up to the limit; then the run fails",
)
@only(*ALIKE)
def test_job_that_crashes_always_is_given_up(scene: Scene) -> None:
    assert "75" in failure_text(scene.run("fail-until:99:75"))
    assert scene.started() == 1 + QUICK.restarts
    scene.ends(starts=2 + QUICK.restarts)


@scene_fault(
    "machines lost again and again while the work advances",
    "a log line each time",
    "restarted every time; only restarts without progress are counted",
)
@only(*ALIKE)
def test_job_that_gets_on_is_started_again_without_end(scene: Scene) -> None:
    limits = dataclasses.replace(QUICK, progress=scene.started)
    assert scene.run("die-until:6:1", limits=limits).success
    assert scene.started() == 6 > 1 + QUICK.restarts
    scene.ends(starts=6)


@scene_fault(
    "machine lost while the job runs", "a log line with the service's message", "{scene.again}"
)
def test_job_whose_machine_is_lost_goes_on_on_another(scene: Scene) -> None:
    scene.once_started(lambda: scene.runner.stand_in.preempt(scene.jobs()[0].name))
    result = scene.run("hang-until:2")
    assert result.success == (scene.service.again == RESTARTED)
    if result.success:
        assert "starting it again, 1 of at most 2" in log_text(scene.instance, result)
    scene.ends(starts=2)


@scene_fault("machine that stops reporting", "a log line that says so", RESTARTED)
@only(*MACHINES)
def test_job_whose_machine_is_silent_goes_on_on_another(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tpu_vm, "REPORT_SECONDS", 0.5)
    monkeypatch.setattr(tpu_vm, "SILENT_SECONDS", 10.0)

    def silence() -> None:
        (job,) = scene.jobs()
        if scene.service is BATCH:
            scene.google.batch.preempt(job.name, 50002)
        else:
            scene.google.tpu.hang(job.name)

    scene.once_started(silence)
    result = scene.run("hang-until:2")
    told = "with exit code 50002" if scene.service is BATCH else "nothing was heard of its machine"
    assert result.success and told in log_text(scene.instance, result)
    scene.ends(starts=2)


@scene_fault("machine preempted before the job runs", "a log line", "restarted on new machines")
@only(*MACHINES, VERTEX)
def test_job_pre_empted_before_it_ran_is_started_again(scene: Scene) -> None:
    scene.runner.hold_pending()

    def preempt() -> None:
        wait_until(lambda: scene.phases() == [Phase.WAITING])
        scene.runner.stand_in.preempt(scene.jobs()[0].name)
        scene.runner.hold_pending(False)

    threading.Thread(target=preempt, daemon=True).start()
    assert scene.run().success and len(scene.jobs()) == 2
    scene.ends(starts=1)


NO_MACHINES = [
    (BATCH, "no machine is free", "hold_pending", "region"),
    (TPU, "no machine is free", "hold_pending", "region"),
    (BATCH, "the zone runs out of machines while they are created", "out_of_stock", "flex-start"),
    (BATCH, "the quota is used up while machines are created", "over_quota", "iam-admin/quotas"),
    (VERTEX, "no machine is free", "hold_pending", "region"),
    (VERTEX, "job queued because the quota is used up", "hold_queued", "iam-admin/quotas"),
    (DATAPROC, "no machine is free", "hold_pending", "region"),
]


@scene_fault(
    "{why}",
    "how long the job waited, why, and what to do",
    "{scene.removed} after `pending_hours`",
)
@pytest.mark.parametrize(
    ("scene", "why", "script", "told"),
    [
        pytest.param(*row, marks=[pytest.mark.soak] if row[0] is DATAPROC else [])
        for row in NO_MACHINES
    ],
    indirect=["scene"],
)
def test_job_that_gets_no_machines_is_ended_with_those_it_had(
    scene: Scene, why: str, script: str, told: str
) -> None:
    setattr(scene.runner.stand_in, script, True)
    text = failure_text(scene.run(limits=SHORT))
    assert "never scheduled" in text and told in text, why
    assert not scene.left()
    setattr(scene.runner.stand_in, script, False)
    scene.ends(starts=1)


@scene_fault("image missing", "how to build it", "nothing runs")
def test_missing_image_says_how_to_make_it(scene: Scene) -> None:
    text = failure_text(scene.run(image="somewhere/missing:1"))
    assert "somewhere/missing:1" in text and "images/build.sh" in text
    assert ("service agent" if scene.service is VERTEX else "the job's service account") in text
    scene.ends(starts=1)


@scene_fault(
    "run canceled while its job is waiting for machines", "the run is canceled", "{scene.removed}"
)
def test_cancelled_run_ends_a_job_that_waits(scene: Scene) -> None:
    scene.runner.hold_pending()
    end(scene.start("sleep:600", until=Phase.WAITING))
    scene.runner.hold_pending(False)
    scene.ends(starts=1)


@scene_fault(
    "run interrupted in its terminal (Ctrl-C)", "that it was interrupted", "{scene.removed}"
)
@only(*ALIKE)
def test_interrupted_run_ends_its_job(scene: Scene) -> None:
    end(scene.start("sleep:600", until=Phase.RUNNING), signal.SIGINT)
    scene.ends(starts=2)


@scene_fault(
    "run canceled during a slow submission of its job",
    "the run is canceled",
    "once the service has answered, {scene.removed}",
)
def test_run_cancelled_before_it_knows_its_job_ends_it(scene: Scene) -> None:
    scene.runner.hold_pending()
    scene.google.server.faults.delay(scene.runner.create_method, 4.0)
    process = scene.start(until=Phase.WAITING)
    end(process)
    # In the midst of a call gRPC may lose the exception, or end the process by a damaged heap.
    assert "Submitted" in process.output.read_text()
    scene.runner.hold_pending(False)
    scene.ends(starts=1)


@scene_fault(
    "run canceled while its job is submitted again", "the run is canceled", "{scene.removed}"
)
@only(*ALIKE)
def test_run_cancelled_while_it_submits_its_job_again_ends_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, submitted = RemoteRun._find_or_create, []

    def submit_and_end(run: RemoteRun) -> RemoteJob:
        submitted.append(submit(run))
        if len(submitted) == 2:
            raise KeyboardInterrupt
        return submitted[-1]

    monkeypatch.setattr(RemoteRun, "_find_or_create", submit_and_end)
    with suppress(KeyboardInterrupt):
        scene.run("die-until:2:1", "sleep:600")
    monkeypatch.undo()
    wait_until(lambda: not scene.left(), told=lambda: str(scene.left()))


@scene_fault("run canceled while its job is running", "the run is canceled", "{scene.removed}")
@scene_fault(
    "request to cancel the job refused twice",
    "a log line each time",
    "repeated until it succeeds",
)
def test_refused_cancelling_is_asked_for_again(scene: Scene) -> None:
    process = scene.start("sleep:600", until=Phase.RUNNING)
    if scene.service in OWN:
        scene.runner.stand_in.refused_deletions = 2
    else:
        busy = grpc.StatusCode.UNAVAILABLE
        scene.google.server.faults.add(scene.service.cancel_method, busy, times=2)
    end(process)
    assert scene.google.server.faults.count(scene.service.cancel_method) == 3
    scene.ends(starts=2)


@scene_fault("slow cancellation of the job", "nothing", "the run ends once the machines are gone")
@only(*MACHINES)
def test_run_waits_until_its_machines_are_gone(scene: Scene) -> None:
    process = scene.start("sleep:600", until=Phase.RUNNING)
    scene.runner.stand_in.deletion_seconds = 3.0
    end(process)
    assert not scene.left()
    scene.ends(starts=2)


@scene_fault("answer to the cancellation lost", "a log line", "the request is repeated")
def test_lost_answer_to_a_cancelling_is_no_failure(scene: Scene) -> None:
    process = scene.start("sleep:600", until=Phase.RUNNING)
    method = scene.service.cancel_method
    scene.google.server.faults.add(method, grpc.StatusCode.UNAVAILABLE, after_work=True)
    end(process)
    scene.ends(starts=2)


@scene_fault("run relaunched while its job is being canceled", "nothing", "a new job is submitted")
@only(*MACHINES, VERTEX)
def test_job_that_is_being_cancelled_is_not_adopted(scene: Scene) -> None:
    scene.google.batch.deletion_seconds = scene.google.tpu.deletion_seconds = 8.0
    scene.google.vertex.cancel_seconds = 8.0
    process = scene.start("sleep:600", until=Phase.RUNNING)
    os.kill(process.pid, signal.SIGTERM)
    wait_until(lambda: Phase.CANCELLING in scene.phases())
    assert scene.run().success
    process.wait(timeout=WAIT_SECONDS)
    scene.ends(starts=2)


@scene_fault("job ended by somebody else", "that it was", "the run fails")
def test_job_that_somebody_ended_is_told_as_such(scene: Scene) -> None:
    scene.once_started(lambda: scene.remote.cancel(scene.jobs()[0]))
    text = failure_text(scene.run("sleep:600"))
    assert "cancelled" in text and (scene.service not in OWN or "It was deleted" in text)
    scene.ends(starts=2)


@scene_fault("spending limit exceeded", "what was spent", "{scene.removed}")
def test_job_that_costs_too_much_is_ended(scene: Scene) -> None:
    def objection(job: RemoteJob) -> str | None:
        paid = job.phase is Phase.RUNNING and job.started and scene.started()
        return "the money is spent" if paid else None

    limits = dataclasses.replace(QUICK, objection=objection)
    text = failure_text(scene.run("sleep:600", limits=limits))
    assert "was cancelled: the money is spent" in text
    assert scene.service not in OWN or scene.jobs() == []
    scene.ends(starts=2)


def lose_connections(scene: Scene) -> None:
    scene.google.server.reset_connection_on(scene.runner.create_method, after_work=True)
    scene.google.server.reset_connection_on(scene.runner.get_method, times=2)


def answer_late(scene: Scene) -> None:
    for method in (scene.runner.create_method, scene.runner.get_method):
        scene.google.server.faults.delay(method, 1.5)


def claim_to_be_busy(scene: Scene) -> None:
    method, busy = scene.runner.create_method, grpc.StatusCode.UNAVAILABLE
    scene.google.server.faults.add(method, busy, times=2, after_work=True)


@scene_fault(
    "none: the job finishes as planned",
    "its results",
    "its machines are gone; no second job is started",
)
@scene_fault("{fault}", "{sees}", "one job is started")
@pytest.mark.parametrize(
    ("fault", "sees", "arrange"),
    [
        ("network lost while the job is submitted", "nothing", lose_connections),
        ("service answers late", "nothing", answer_late),
        ("service says UNAVAILABLE but has accepted the job", "a log line", claim_to_be_busy),
    ],
)
def test_whatever_becomes_of_requests_one_job_is_started(
    scene: Scene, fault: str, sees: str, arrange: Callable[[Scene], None]
) -> None:
    arrange(scene)
    assert scene.run().success and len(scene.jobs()) == 1, fault
    scene.ends(starts=1)


@scene_fault(
    "network lost while the job runs",
    "at most a log line each time",
    "the run continues to follow the job",
)
def test_connection_cut_while_it_runs_loses_nothing(scene: Scene, tmp_path: Path) -> None:
    server, method = scene.google.server, scene.runner.get_method

    def cut() -> None:
        asked = server.faults.count(method)
        server.reset_connection_on(method, times=3)
        wait_until(lambda: server.faults.count(method) > asked + 3)
        (tmp_path / "go").touch()

    scene.once_started(cut)
    assert scene.run(f"wait:{tmp_path / 'go'}").success
    scene.ends(starts=1)


@scene_fault(
    "service stops answering",
    "the error, and that the job still runs and costs money",
    "the run fails; the next run follows the job",
)
def test_service_that_stays_away_is_given_up_and_its_job_found_again(
    scene: Scene, tmp_path: Path
) -> None:
    faults, silent = scene.google.server.faults, grpc.StatusCode.DEADLINE_EXCEEDED
    scene.once_started(lambda: faults.add(scene.runner.get_method, silent, times=1000))
    limits = dataclasses.replace(QUICK, retries=RetryPolicy(0.05, 0.2, 1.5))
    text = failure_text(scene.run(f"wait:{tmp_path / 'go'}", limits=limits))
    assert "504" in text and "The job goes on and costs money" in text
    faults.clear()
    (tmp_path / "go").touch()
    scene.ends(starts=1)


@scene_fault(
    "Dagster killed {moment}",
    "the run's process is gone",
    "the next run follows the same job, or submits it if there is none",
)
@pytest.mark.parametrize(
    ("moment", "point"),
    [
        ("while it looks for its job", "_find_or_create"),
        ("once its job is submitted", "_take"),
        ("while its job waits for machines", Phase.WAITING),
        ("while its job runs", Phase.RUNNING),
        ("once its job has ended", "_judge"),
        ("while it cancels its job", "_cancel_once"),
    ],
)
def test_killed_dagster_finds_its_job_again(
    scene: Scene, tmp_path: Path, moment: str, point: str | Phase
) -> None:
    is_phase = isinstance(point, Phase)
    scene.runner.hold_pending(point is Phase.WAITING)
    killed_at = "" if is_phase else str(point)
    steps = [f"wait:{tmp_path / 'go'}"] if is_phase or point == "_cancel_once" else []
    until = point if isinstance(point, Phase) else Phase.RUNNING if steps else None
    process = scene.start(*steps, until=until, killed_at=killed_at)
    if steps:
        os.kill(process.pid, signal.SIGKILL if is_phase else signal.SIGTERM)
    assert process.wait(timeout=WAIT_SECONDS) == -signal.SIGKILL, moment
    scene.runner.hold_pending(False)
    (tmp_path / "go").touch()
    scene.ends(starts=1)
    assert len(scene.jobs()) == 1


@scene_fault("two runs of the same work at once", "nothing", "they share one job")
def test_two_runs_at_once_share_one_job(scene: Scene) -> None:
    runs = [scene.start("sleep:5") for _ in range(2)]
    assert [run.wait(timeout=WAIT_SECONDS) for run in runs] == [0, 0]
    assert scene.phases().count(Phase.SUCCEEDED) == 1
    scene.ends(starts=None)
