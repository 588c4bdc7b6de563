"""How a job on machines of one's own may end: in each case nothing bills afterwards."""

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from dagster import DagsterInstance

from artifacts.storage import files
from llm_assets.pipes import Limits
from llm_assets.pipes.service import Phase, RemoteJob
from tests.forked import ForkedProcess
from tests.llm_assets.pipes.runner import QUICK, Runner, failure_text, log_text
from tests.stand_ins.google import LocalGoogle
from tests.waiting import WAIT_SECONDS, wait_until

STAGE = "machines of one's own"
SHORT = Limits(poll_seconds=0.2, pending_seconds=1.0)


@pytest.fixture(autouse=True)
def bill_ends(google: LocalGoogle) -> Iterator[None]:
    """Fails a test after whose end a machine still costs money."""
    yield
    wait_until(lambda: not google.batch.billing())


def once_running(
    google: LocalGoogle, action: Callable[[str], object], counted: Path | None = None
) -> None:
    """Do something to the first job once it runs, and once its program has counted its start."""

    def wait_and_act() -> None:
        wait_until(lambda: [job.status.state.name for job in google.batch.jobs()] == ["RUNNING"])
        if counted:
            wait_until(counted.exists)
        time.sleep(5 * QUICK.poll_seconds)
        action(google.batch.jobs()[0].name)

    threading.Thread(target=wait_and_act, daemon=True).start()


def running_process(runner: Runner, steps: list[str], state: str = "RUNNING") -> ForkedProcess:
    """A Dagster process whose job is in a state."""
    process = runner.start_process(steps)
    wait_until(lambda: any(job.status.state.name == state for job in runner.jobs()))
    return process


def end(process: ForkedProcess, number: signal.Signals = signal.SIGTERM) -> None:
    """Cancel a run as Dagster does, most often while it waits for its job."""
    time.sleep(0.5)
    os.kill(process.pid, number)
    assert process.wait(timeout=WAIT_SECONDS) != 0


@pytest.mark.fault(
    STAGE, "finished", sees="its results", then="Batch has deleted the machines; asked again, done"
)
def test_finished_job_is_taken_as_done(batch_runner: Runner, google: LocalGoogle) -> None:
    assert batch_runner.run(["materialize"]).success
    wait_until(lambda: not google.batch.billing())
    assert batch_runner.run(["materialize"]).success
    assert len(google.batch.bill) == 1


@pytest.mark.fault(
    STAGE, "failed by its input", sees="the program's own reason", then="not started again"
)
def test_fault_of_the_input_is_told_and_not_tried_again(
    batch_runner: Runner, google: LocalGoogle
) -> None:
    text = failure_text(batch_runner.run(["raise:the valve is stuck"]))
    assert "ValueError: the valve is stuck" in text
    assert "/batch/jobsDetail/" in text and "batch_task_logs" in text
    assert len(google.batch.bill) == 1


@pytest.mark.fault(
    STAGE,
    "{reason}",
    sees="a line",
    then="started again on new machines, from the newest checkpoint",
)
@pytest.mark.parametrize(
    ("reason", "step"),
    [
        ("a worker crashes without a word", "die-until:3:1"),
        ("a worker is killed for its memory", "die-until:3:137"),
        ("a worker is lost by the others", "lose-until:3"),
        ("told to end (exit code 75)", "fail-until:3:75"),
    ],
)
def test_job_that_ends_without_a_fault_of_its_input_is_started_again(
    batch_runner: Runner, tmp_path: Path, reason: str, step: str
) -> None:
    result = batch_runner.run(["--count", str(tmp_path / "starts"), step, "materialize"])
    assert result.success, reason
    (event,) = result.asset_materializations_for_node("figures")
    assert (event.metadata["start"].value, event.metadata["restarts"].value) == (3, 2)


@pytest.mark.fault(
    STAGE,
    "a worker crashes again and again",
    sees="its exit code",
    then="started again so often, then failed",
)
def test_job_that_crashes_always_is_given_up(
    batch_runner: Runner, google: LocalGoogle, tmp_path: Path
) -> None:
    steps = ["--count", str(tmp_path / "starts"), "die-until:99:1"]
    assert "exit code 1" in failure_text(batch_runner.run(steps))
    assert len(google.batch.bill) == 1 + QUICK.restarts


@pytest.mark.fault(
    STAGE,
    "machines lost again and again while work goes on",
    sees="a line each time",
    then="started again however often; only restarts in vain are counted",
)
def test_job_that_gets_on_is_started_again_without_end(
    batch_runner: Runner, google: LocalGoogle, tmp_path: Path
) -> None:
    starts = tmp_path / "starts"
    limits = dataclasses.replace(QUICK, progress=lambda: files.find(starts))
    runner = batch_runner.changed(limits=limits)
    assert runner.run(["--count", str(starts), "die-until:6:1", "materialize"]).success
    assert len(google.batch.bill) == 6 > 1 + QUICK.restarts


@pytest.mark.fault(
    STAGE,
    "machine lost: {why}",
    sees="a line with Batch's own words",
    then="started again on new machines, from the newest checkpoint",
)
@pytest.mark.parametrize(("why", "code"), [("pre-empted", 50001), ("silent", 50002)])
def test_job_whose_machine_is_lost_goes_on_on_another(
    batch_runner: Runner, google: LocalGoogle, tmp_path: Path, why: str, code: int
) -> None:
    starts = tmp_path / "starts"
    once_running(google, lambda name: google.batch.preempt(name, code), starts)
    instance = DagsterInstance.ephemeral()
    steps = ["--count", str(starts), "hang-until:2", "materialize"]
    result = batch_runner.run(steps, instance)
    assert result.success
    log = log_text(instance, result)
    assert f"with exit code {code}" in log and "starting it again, 1 of at most 2" in log
    assert len(google.batch.bill) == 2


@pytest.mark.fault(
    STAGE, "pre-empted in creation", sees="a line", then="started again on new machines"
)
def test_job_pre_empted_before_it_ran_is_started_again(
    batch_runner: Runner, google: LocalGoogle
) -> None:
    google.batch.hold_pending = True

    def preempt() -> None:
        wait_until(lambda: [j.status.state.name for j in google.batch.jobs()] == ["SCHEDULED"])
        google.batch.hold_pending = False
        google.batch.preempt(google.batch.jobs()[0].name)

    threading.Thread(target=preempt, daemon=True).start()
    assert batch_runner.run(["materialize"]).success
    assert len(google.batch.jobs()) == 2


@pytest.mark.fault(
    STAGE, "longer than `timeout_hours`", sees="that Google ended it", then="not started again"
)
def test_job_is_ended_by_google_after_its_greatest_duration(
    batch_runner: Runner, google: LocalGoogle
) -> None:
    runner = batch_runner.changed(scheduling={"max_run_duration": {"seconds": 2}})
    assert "maximum run duration" in failure_text(runner.run(["sleep:600"]))
    assert len(google.batch.bill) == 1


@pytest.mark.fault(
    STAGE,
    "{why} while machines are made",
    sees="Batch's own words, and what to ask for",
    then="deleted after `pending_hours`, with the machines that were made",
)
@pytest.mark.parametrize(
    ("why", "script", "told"),
    [
        ("a zone has none left", "out_of_stock", "flex-start"),
        ("the quota is used up", "over_quota", "iam-admin/quotas?project=local-project"),
    ],
)
def test_job_that_gets_no_machines_is_deleted_with_those_it_had(
    batch_runner: Runner, google: LocalGoogle, why: str, script: str, told: str
) -> None:
    setattr(google.batch, script, True)
    text = failure_text(batch_runner.changed(limits=SHORT).run(["materialize"]))
    assert "never scheduled" in text and told in text, why
    assert google.batch.jobs() == []


@pytest.mark.fault(STAGE, "image missing", sees="how to make it", then="nothing runs")
def test_missing_image_says_how_to_make_it(batch_runner: Runner, google: LocalGoogle) -> None:
    text = failure_text(batch_runner.changed(image="somewhere/missing:1").run(["materialize"]))
    assert "somewhere/missing:1" in text and "images/build.sh" in text
    assert len(google.batch.bill) == 1


@pytest.mark.fault(
    STAGE, "run cancelled while its job is {state}", sees="the run is canceled", then="deleted"
)
@pytest.mark.parametrize("state", ["SCHEDULED", "RUNNING"])
def test_cancelled_run_deletes_its_job(
    batch_runner: Runner, google: LocalGoogle, state: str
) -> None:
    google.batch.hold_pending = state == "SCHEDULED"
    end(running_process(batch_runner, ["sleep:600"], state))
    assert google.batch.jobs() == [] == google.batch.billing()


@pytest.mark.fault(
    STAGE, "deletion refused twice", sees="a line each time", then="asked for until it is done"
)
def test_refused_deletion_is_asked_for_again(batch_runner: Runner, google: LocalGoogle) -> None:
    process = running_process(batch_runner, ["sleep:600"])
    google.batch.refused_deletions = 2
    end(process)
    assert google.server.faults.count("DeleteJob") == 3
    assert google.batch.jobs() == [] == google.batch.billing()


@pytest.mark.fault(
    STAGE, "deletion that takes long", sees="nothing", then="the run ends once the machines have"
)
def test_run_waits_until_its_machines_are_gone(batch_runner: Runner, google: LocalGoogle) -> None:
    process = running_process(batch_runner, ["sleep:600"])
    google.batch.deletion_seconds = 3.0
    end(process, signal.SIGINT)
    assert google.batch.jobs() == [] == google.batch.billing()


@pytest.mark.fault(
    STAGE, "answer to the deletion lost", sees="a line", then="asked for again, and not found"
)
def test_lost_answer_to_a_deletion_is_no_failure(batch_runner: Runner, google: LocalGoogle) -> None:
    process = running_process(batch_runner, ["sleep:600"])
    google.server.faults.add("DeleteJob", grpc.StatusCode.UNAVAILABLE, after_work=True)
    end(process)
    assert google.batch.jobs() == [] == google.batch.billing()


@pytest.mark.fault(
    STAGE, "network lost while it is submitted", sees="nothing", then="one job is started"
)
def test_connection_cut_while_submitting_starts_one_job(
    batch_runner: Runner, google: LocalGoogle
) -> None:
    google.server.reset_connection_on("CreateJob", after_work=True)
    google.server.reset_connection_on("GetJob", times=2)
    assert batch_runner.run(["materialize"]).success
    assert len(google.batch.bill) == 1


@pytest.mark.fault(
    STAGE, "Dagster killed while it runs", sees="the run is gone", then="the next run follows it"
)
def test_killed_dagster_finds_its_job_again(batch_runner: Runner, google: LocalGoogle) -> None:
    process = running_process(batch_runner, ["sleep:2", "log:hello", "materialize"])
    process.kill()
    process.wait()
    instance = DagsterInstance.ephemeral()
    result = batch_runner.run(["sleep:2", "log:hello", "materialize"], instance)
    assert result.success
    assert "hello" in log_text(instance, result)
    assert len(google.batch.bill) == 1


@pytest.mark.fault(
    STAGE, "two runs of the same work at once", sees="nothing", then="they share one job"
)
def test_two_runs_at_once_share_one_job(batch_runner: Runner, google: LocalGoogle) -> None:
    runs = [batch_runner.start_process(["sleep:1", "materialize"]) for _ in range(2)]
    assert [run.wait(timeout=WAIT_SECONDS) for run in runs] == [0, 0]
    assert len(google.batch.bill) == 1


@pytest.mark.fault(
    STAGE, "job deleted by somebody else", sees="that it was deleted", then="the run fails"
)
def test_job_that_somebody_deleted_is_told_as_such(
    batch_runner: Runner, google: LocalGoogle
) -> None:
    from google.cloud.batch_v1 import BatchServiceClient

    client = BatchServiceClient(client_options={"api_endpoint": batch_runner.endpoint})
    once_running(google, lambda name: client.delete_job(name=name))
    assert "It was deleted" in failure_text(batch_runner.run(["sleep:600"]))


@pytest.mark.fault(STAGE, "ceiling in money passed", sees="what was spent", then="deleted")
def test_job_that_costs_too_much_is_deleted(batch_runner: Runner, google: LocalGoogle) -> None:
    def objection(job: RemoteJob) -> str | None:
        return "the money is spent" if job.phase is Phase.RUNNING and job.started else None

    limits = dataclasses.replace(QUICK, objection=objection)
    text = failure_text(batch_runner.changed(limits=limits).run(["sleep:600"]))
    assert "was cancelled: the money is spent" in text
    assert google.batch.jobs() == []
