"""What Google, the network and people do to a job, through the real clients."""

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path

import grpc
import pytest
from dagster import DagsterInstance

from artifacts.program.entry import FLUSH_SECONDS
from llm_assets.pipes import Limits, RetryPolicy
from llm_assets.pipes.service import Phase, RemoteJob
from tests.forked import ForkedProcess
from tests.llm_assets.pipes.runner import QUICK, Runner, failure_text, log_text
from tests.stand_ins.google import BUCKET, LocalGoogle
from tests.waiting import WAIT_SECONDS, wait_until

BUSY = [
    pytest.param(grpc.StatusCode.RESOURCE_EXHAUSTED, "Requests per minute: quota", id="429"),
    pytest.param(grpc.StatusCode.UNAVAILABLE, "try again", id="503"),
    pytest.param(grpc.StatusCode.UNAUTHENTICATED, "token expired", id="expired-token"),
]


@pytest.mark.fault("Google Cloud", "service busy", sees="a line each time", then="asked again")
@pytest.mark.parametrize(("code", "message"), BUSY)
def test_busy_service_is_asked_again(
    vertex_runner: Runner, google: LocalGoogle, code: grpc.StatusCode, message: str
) -> None:
    google.server.faults.add("CreateCustomJob", code, message, times=2)
    google.server.faults.add("GetCustomJob", code, message, times=2)
    instance = DagsterInstance.ephemeral()
    result = vertex_runner.run(["materialize"], instance)
    assert result.success
    assert len(vertex_runner.jobs()) == 1
    assert log_text(instance, result).count("Trying again in") == 4


@pytest.mark.fault(
    "Google Cloud", "service busy for ever", sees="what it said", then="given up in the end"
)
def test_busy_service_is_given_up_in_the_end(vertex_runner: Runner, google: LocalGoogle) -> None:
    google.server.faults.add("CreateCustomJob", grpc.StatusCode.UNAVAILABLE, times=1000)
    runner = vertex_runner.changed(limits=Limits(retries=RetryPolicy(0.05, 0.2, 1.5)))
    assert "503" in failure_text(runner.run(["materialize"]))
    assert 3 < google.server.faults.count("CreateCustomJob") < 20


@pytest.mark.fault(
    "Google Cloud",
    "connection cut while a job is submitted",
    sees="nothing",
    then="one job is started",
)
def test_connection_cut_while_submitting_starts_one_job(
    runner: Runner, google: LocalGoogle
) -> None:
    google.server.reset_connection_on(runner.create_method, after_work=True)
    google.server.reset_connection_on(runner.get_method, times=2)
    assert runner.run(["materialize"]).success
    assert len(runner.jobs()) == 1


@pytest.mark.fault(
    "Google Cloud", "job never scheduled", sees="how long, and what to do", then="cancelled"
)
def test_job_that_is_never_scheduled_is_cancelled_with_advice(runner: Runner) -> None:
    runner.hold_pending()
    limits = Limits(poll_seconds=0.2, pending_seconds=1.0)
    text = failure_text(runner.changed(limits=limits).run(["materialize"]))
    assert "never scheduled" in text and "us-central1" in text
    assert [job.state.name.removeprefix("JOB_STATE_") for job in runner.jobs()] == ["CANCELLED"]


@pytest.mark.fault(
    "Google Cloud", "job passes its ceiling in money", sees="what was spent", then="cancelled"
)
def test_job_that_is_objected_to_is_cancelled_and_nothing_is_left_running(runner: Runner) -> None:
    def objection(job: RemoteJob) -> str | None:
        return "the money is spent" if job.phase is Phase.RUNNING and job.started else None

    limits = dataclasses.replace(QUICK, objection=objection)
    text = failure_text(runner.changed(limits=limits).run(["sleep:600"]))
    assert "was cancelled: the money is spent" in text
    assert [job.state.name.removeprefix("JOB_STATE_") for job in runner.jobs()] == ["CANCELLED"]


@pytest.mark.fault(
    "Google Cloud",
    "job queued for a quota that is used up",
    sees="that it is, and where to ask for more",
    then="cancelled in the end",
)
def test_job_that_waits_for_a_quota_says_so(vertex_runner: Runner, google: LocalGoogle) -> None:
    google.vertex.hold_queued = True
    limits = Limits(poll_seconds=0.2, pending_seconds=1.0)
    instance = DagsterInstance.ephemeral()
    result = vertex_runner.changed(limits=limits).run(["materialize"], instance)
    assert "while the project's quota for its machines is used up" in log_text(instance, result)
    assert "iam-admin/quotas?project=local-project" in failure_text(result)
    assert google.vertex.jobs()[0].state.name == "JOB_STATE_CANCELLED"


@pytest.mark.fault(
    "Google Cloud", "region out of machines", sees="a line", then="submitted again, with pauses"
)
def test_job_that_met_a_region_without_machines_is_submitted_again(
    vertex_runner: Runner, google: LocalGoogle
) -> None:
    google.vertex.out_of_stock = 2
    assert vertex_runner.run(["materialize"]).success
    assert len(vertex_runner.jobs()) == 3


def test_region_that_stays_without_machines_is_told_with_what_else_to_ask_for(
    vertex_runner: Runner, google: LocalGoogle
) -> None:
    google.vertex.out_of_stock = 99
    text = failure_text(vertex_runner.run(["materialize"]))
    assert "Resources are insufficient in region" in text and "flex-start" in text
    assert len(vertex_runner.jobs()) == 3


@pytest.mark.fault(
    "Google Cloud",
    "key revoked while a job runs",
    sees="how to renew it, and that the job goes on",
    then="the next run follows the job",
)
def test_key_revoked_while_a_job_runs_is_told_and_the_job_is_found_again(
    vertex_runner: Runner, google: LocalGoogle, tmp_path: Path
) -> None:
    def revoke() -> None:
        wait_until(
            lambda: [job.state.name for job in vertex_runner.jobs()] == ["JOB_STATE_RUNNING"]
        )
        google.tokens.revoked = True

    threading.Thread(target=revoke, daemon=True).start()
    flag = tmp_path / "go"
    text = failure_text(vertex_runner.run([f"wait:{flag}", "materialize"]))
    (job,) = vertex_runner.jobs()
    assert "key in GOOGLE_APPLICATION_CREDENTIALS" in text
    assert "The job goes on and costs money" in text and job.name.rsplit("/")[-1] in text
    google.tokens.revoked = False
    flag.touch()
    assert vertex_runner.run([f"wait:{flag}", "materialize"]).success
    assert len(vertex_runner.jobs()) == 1


def test_role_taken_away_while_a_job_runs_is_told_and_the_job_is_found_again(
    vertex_runner: Runner, google: LocalGoogle, tmp_path: Path
) -> None:
    def take_away() -> None:
        wait_until(
            lambda: [job.state.name for job in vertex_runner.jobs()] == ["JOB_STATE_RUNNING"]
        )
        google.iam.denied.add("aiplatform.customJobs.get")

    threading.Thread(target=take_away, daemon=True).start()
    flag = tmp_path / "go"
    text = failure_text(vertex_runner.run([f"wait:{flag}", "materialize"]))
    assert "for roles/aiplatform.user on it" in text
    assert "The job goes on and costs money" in text
    google.iam.denied.clear()
    flag.touch()
    assert vertex_runner.run([f"wait:{flag}", "materialize"]).success
    assert len(vertex_runner.jobs()) == 1


def test_clock_that_is_off_is_told_as_such(vertex_runner: Runner, google: LocalGoogle) -> None:
    message = (
        "Getting metadata from plugin failed with error: ('invalid_grant: Invalid JWT: Token must "
        "be a short-lived token (60 minutes) and in a reasonable timeframe. Check your iat and exp "
        "values in the JWT claim.', {'error': 'invalid_grant'})"
    )
    method = vertex_runner.create_method
    google.server.faults.add(method, grpc.StatusCode.UNAVAILABLE, message, times=1000)
    text = failure_text(vertex_runner.run(["materialize"]))
    assert "The clock of this machine" in text and "gcloud auth" not in text
    assert google.server.faults.count(method) == 1


def test_login_that_has_expired_is_no_busy_service(
    vertex_runner: Runner, google: LocalGoogle
) -> None:
    message = (
        "Getting metadata from plugin failed with error: ('invalid_grant: Bad Request', "
        "{'error': 'invalid_grant'})"
    )
    method = vertex_runner.create_method
    google.server.faults.add(method, grpc.StatusCode.UNAVAILABLE, message, times=1000)
    text = failure_text(vertex_runner.run(["materialize"]))
    assert "gcloud auth application-default login" in text
    assert google.server.faults.count(method) == 1


@pytest.mark.fault(
    "Google Cloud", "bucket missing", sees="the command that makes it", then="nothing is submitted"
)
def test_missing_bucket_stops_before_anything_is_submitted(runner: Runner) -> None:
    text = failure_text(runner.changed(bucket="no-such-bucket").run(["materialize"]))
    assert "gcloud storage buckets create gs://no-such-bucket" in text
    assert runner.jobs() == []


@pytest.mark.fault(
    "Google Cloud",
    "messages unreadable",
    sees="the role to ask for",
    then="never taken for success",
)
def test_unreadable_messages_fail_and_say_what_to_ask_for(
    vertex_runner: Runner, google: LocalGoogle
) -> None:
    google.storage.add_fault(403, method="GET", contains="/messages", times=1000, skip=1)
    text = failure_text(vertex_runner.run(["materialize"]))
    assert "roles/storage.objectUser" in text


@pytest.mark.fault("Google Cloud", "wrong region", sees="the region", then="nothing runs")
def test_region_mismatch_names_the_region(runner: Runner) -> None:
    text = failure_text(runner.changed(region="europe-west4").run(["materialize"]))
    assert "europe-west4" in text and "one region" in text


@pytest.mark.fault("Google Cloud", "image missing", sees="how to make it", then="nothing runs")
def test_missing_image_says_how_to_make_it(runner: Runner) -> None:
    text = failure_text(runner.changed(image="somewhere/missing:1").run(["materialize"]))
    assert "somewhere/missing:1" in text and "images/build.sh" in text
    puller = "service agent" if runner.service == "vertex" else "the job's service account"
    assert puller in text


@pytest.mark.fault(
    "Google Cloud", "storage busy", sees="nothing", then="messages are late, none is lost"
)
def test_busy_storage_delays_messages_and_loses_none(
    vertex_runner: Runner, google: LocalGoogle
) -> None:
    google.storage.add_fault(503, method="GET", contains="/messages", times=3, skip=1)
    google.storage.add_fault(0, method="GET", contains="/messages", times=2, skip=4)
    instance = DagsterInstance.ephemeral()
    result = vertex_runner.run(["log:hello", "materialize"], instance)
    assert result.success
    assert "hello" in log_text(instance, result)


def test_exit_75_is_started_again_and_goes_on(vertex_runner: Runner, tmp_path: Path) -> None:
    instance = DagsterInstance.ephemeral()
    steps = ["--count", str(tmp_path / "starts"), "fail-until:3:75", "materialize"]
    result = vertex_runner.run(steps, instance)
    assert result.success
    event = result.asset_materializations_for_node("figures")[0]
    assert (event.metadata["start"].value, event.metadata["restarts"].value) == (3, 2)
    assert "was interrupted" in log_text(instance, result)


@pytest.mark.fault(
    "Google Cloud",
    "job interrupted again and again",
    sees="its exit code",
    then="started again so often, then failed",
)
def test_exit_75_is_started_again_only_so_often(vertex_runner: Runner, tmp_path: Path) -> None:
    steps = ["--count", str(tmp_path / "starts"), "fail-until:99:75"]
    assert "75" in failure_text(vertex_runner.run(steps))
    assert len(vertex_runner.jobs()) == 3


def preempt_once_heard(google: LocalGoogle, said: str) -> None:
    """Take the machines of the first Vertex job away once its program's words have been read."""
    from google.cloud import storage

    def is_written() -> bool:
        blobs = storage.Client().list_blobs(BUCKET, prefix="messages/")
        return any(said in blob.download_as_text() for blob in blobs)

    def wait_and_preempt() -> None:
        wait_until(is_written)
        time.sleep(5 * QUICK.poll_seconds)
        google.vertex.preempt(google.vertex.jobs()[0].name)

    threading.Thread(target=wait_and_preempt, daemon=True).start()


@pytest.mark.fault("Google Cloud", "job pre-empted", sees="a line", then="submitted again, goes on")
def test_preempted_job_is_submitted_again(
    vertex_runner: Runner, google: LocalGoogle, tmp_path: Path
) -> None:
    preempt_once_heard(google, "begun (start 1)")
    steps = ["--count", str(tmp_path / "starts"), "log:begun", "hang-until:2", "materialize"]
    result = vertex_runner.run(steps)
    assert result.success
    assert len(vertex_runner.jobs()) == 2


@pytest.mark.fault(
    "Google Cloud", "worker restarted inside a job", sees="nothing", then="no message is lost"
)
def test_worker_restart_inside_a_job_loses_no_messages(
    vertex_runner: Runner, google: LocalGoogle, tmp_path: Path
) -> None:
    runner = vertex_runner.changed(scheduling={"restart_job_on_worker_restart": True})
    preempt_once_heard(google, "b (start 1)")
    # The two words come in different chunks.
    apart = f"sleep:{2 * FLUSH_SECONDS}"
    steps = ["--count", str(tmp_path / "starts"), "log:a", apart, "log:b"]
    instance = DagsterInstance.ephemeral()
    result = runner.run([*steps, "hang-until:2", "materialize"], instance)
    assert result.success
    log = log_text(instance, result)
    for said in ("a (start 1)", "b (start 1)", "a (start 2)", "b (start 2)"):
        assert said in log
    assert result.asset_materializations_for_node("figures")[0].metadata["start"].value == 2
    assert len(runner.jobs()) == 1


def running_process(runner: Runner, steps: list[str]) -> ForkedProcess:
    """A Dagster process whose job has begun to run."""
    process = runner.start_process(steps)
    wait_until(lambda: any("RUNNING" in job.state.name for job in runner.jobs()))
    return process


@pytest.mark.fault(
    "Google Cloud",
    "Dagster killed while its job runs",
    sees="the run is gone",
    then="the next run finds the same job",
)
def test_killed_dagster_finds_its_job_again(runner: Runner) -> None:
    process = running_process(runner, ["sleep:2", "log:hello", "materialize"])
    process.kill()
    process.wait()
    (job,) = runner.jobs()
    assert "RUNNING" in job.state.name
    instance = DagsterInstance.ephemeral()
    result = runner.run(["sleep:2", "log:hello", "materialize"], instance)
    assert result.success
    assert len(runner.jobs()) == 1
    assert "hello" in log_text(instance, result)


@pytest.mark.fault(
    "Google Cloud", "run cancelled", sees="the run is canceled", then="its job is cancelled"
)
@pytest.mark.parametrize(
    ("runner", "number"),
    [("vertex", signal.SIGINT), ("vertex", signal.SIGTERM), ("dataproc", signal.SIGTERM)],
    indirect=["runner"],
)
def test_cancelled_run_cancels_its_job(runner: Runner, number: signal.Signals) -> None:
    process = running_process(runner, ["sleep:600"])
    # Most often a run is cancelled while it waits for its job.
    time.sleep(0.5)
    os.kill(process.pid, number)
    assert process.wait(timeout=WAIT_SECONDS) != 0
    (job,) = runner.jobs()
    assert "CANCELLED" in job.state.name


@pytest.mark.fault(
    "Google Cloud",
    "job just being cancelled",
    sees="nothing",
    then="not adopted; another is submitted",
)
def test_job_that_is_being_cancelled_is_not_adopted(
    vertex_runner: Runner, google: LocalGoogle
) -> None:
    google.vertex.cancel_seconds = 8.0
    process = running_process(vertex_runner, ["sleep:600"])
    os.kill(process.pid, signal.SIGTERM)
    wait_until(lambda: "CANCELLING" in vertex_runner.jobs()[0].state.name)
    assert vertex_runner.run(["materialize"]).success
    assert len(vertex_runner.jobs()) == 2
    process.wait(timeout=WAIT_SECONDS)
