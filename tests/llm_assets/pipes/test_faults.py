"""What Google, the network and people do to a job, through the real clients."""

import dataclasses
import threading
import time
from pathlib import Path

import grpc
import pytest
from dagster import DagsterInstance

from artifacts.errors import LeaseLost
from artifacts.program.entry import FLUSH_SECONDS
from llm_assets.pipes import Limits, RetryPolicy
from llm_assets.pipes.service import RemoteJob
from tests.llm_assets.pipes.runner import QUICK, Runner, failure_text, log_text
from tests.stand_ins.google import BUCKET, LocalGoogle
from tests.waiting import wait_until

BUSY = [
    pytest.param(grpc.StatusCode.RESOURCE_EXHAUSTED, "Requests per minute: quota", id="429"),
    pytest.param(grpc.StatusCode.UNAVAILABLE, "try again", id="503"),
    pytest.param(grpc.StatusCode.UNAUTHENTICATED, "token expired", id="expired-token"),
]


@pytest.mark.fault(
    "Google Cloud", "service busy", sees="a log line each time", then="the request is repeated"
)
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
    "Google Cloud", "service stays busy", sees="the service's error", then="the run fails"
)
def test_busy_service_is_given_up_in_the_end(vertex_runner: Runner, google: LocalGoogle) -> None:
    google.server.faults.add("CreateCustomJob", grpc.StatusCode.UNAVAILABLE, times=1000)
    runner = vertex_runner.changed(limits=Limits(retries=RetryPolicy(0.05, 0.2, 1.5)))
    assert "503" in failure_text(runner.run(["materialize"]))
    assert 1 < google.server.faults.count("CreateCustomJob") < 20


def fails(job: RemoteJob) -> None:
    """In the place of an objection, such as where the lease of a job may not be renewed."""
    raise LeaseLost("no right to the bucket")


REVOKED = pytest.mark.fault(
    "Google Cloud",
    "key revoked while a job runs",
    sees="how to renew it, and that the job continues",
    then="the next run follows the job",
)


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        pytest.param("key", "key in GOOGLE_APPLICATION_CREDENTIALS", marks=REVOKED, id="key"),
        pytest.param("role", "for roles/aiplatform.user on it", id="role"),
        pytest.param("lease", "no right to the bucket", id="lease"),
    ],
)
def test_what_ends_a_run_while_its_job_runs_is_told_and_the_job_is_found_again(
    vertex_runner: Runner, google: LocalGoogle, tmp_path: Path, broken: str, told: str
) -> None:
    def once_it_runs() -> None:
        states = ["JOB_STATE_RUNNING"]
        wait_until(lambda: [job.state.name for job in vertex_runner.jobs()] == states)
        google.tokens.revoked = broken == "key"
        google.iam.denied |= {"aiplatform.customJobs.get"} if broken == "role" else set()

    threading.Thread(target=once_it_runs, daemon=True).start()
    limits = dataclasses.replace(QUICK, objection=fails) if broken == "lease" else QUICK
    steps = [f"wait:{tmp_path / 'go'}", "materialize"]
    text = failure_text(vertex_runner.changed(limits=limits).run(steps))
    (job,) = vertex_runner.jobs()
    assert "The job goes on and costs money" in text and job.name.rsplit("/")[-1] in text
    assert told in text
    google.tokens.revoked = False
    google.iam.denied.clear()
    (tmp_path / "go").touch()
    assert vertex_runner.run(steps).success and len(vertex_runner.jobs()) == 1


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "Invalid JWT: Token must be a short-lived token (60 minutes) and in a reasonable "
            "timeframe. Check your iat and exp values in the JWT claim.",
            "The clock of this machine",
        ),
        ("Bad Request", "gcloud auth application-default login"),
    ],
    ids=["clock", "expired login"],
)
def test_refused_key_is_told_by_its_reason_and_no_busy_service(
    vertex_runner: Runner, google: LocalGoogle, said: str, told: str
) -> None:
    message = (
        f"Getting metadata from plugin failed with error: ('invalid_grant: {said}', "
        "{'error': 'invalid_grant'})"
    )
    method = vertex_runner.create_method
    google.server.faults.add(method, grpc.StatusCode.UNAVAILABLE, message, times=1000)
    text = failure_text(vertex_runner.run(["materialize"]))
    assert told in text and ("gcloud auth" in text) == ("gcloud auth" in told)
    assert google.server.faults.count(method) == 1


@pytest.mark.fault(
    "Google Cloud",
    "bucket missing",
    sees="the command that creates it",
    then="nothing is submitted",
)
def test_missing_bucket_stops_before_anything_is_submitted(runner: Runner) -> None:
    text = failure_text(runner.changed(bucket="no-such-bucket").run(["materialize"]))
    assert "gcloud storage buckets create gs://no-such-bucket" in text
    assert runner.jobs() == []


@pytest.mark.fault(
    "Google Cloud",
    "no permission to read the messages of a job",
    sees="the role to ask for",
    then="the run fails",
)
def test_unreadable_messages_fail_and_say_what_to_ask_for(
    vertex_runner: Runner, google: LocalGoogle
) -> None:
    google.storage.add_fault(403, method="GET", contains="/messages", times=1000, skip=1)
    text = failure_text(vertex_runner.run(["materialize"]))
    assert "roles/storage.objectUser" in text and "The job goes on and costs money" in text


@pytest.mark.fault("Google Cloud", "wrong region", sees="the region", then="nothing runs")
def test_region_mismatch_names_the_region(runner: Runner) -> None:
    text = failure_text(runner.changed(region="europe-west4").run(["materialize"]))
    assert "europe-west4" in text and "one region" in text


@pytest.mark.fault(
    "Google Cloud", "storage busy", sees="nothing", then="messages are late, but none is lost"
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
