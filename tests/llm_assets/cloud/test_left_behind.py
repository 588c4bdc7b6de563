"""Each of the layers that end machines is enough by itself: sensor, sweep, lease."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import yaml
from click.testing import CliRunner
from dagster import (
    DagsterInstance,
    DagsterRun,
    DagsterRunStatus,
    Failure,
    SkipReason,
    build_sensor_context,
    job,
    op,
)
from google.cloud.batch_v1 import BatchServiceClient, Job

from artifacts.errors import UserError
from artifacts.storage import files
from llm_assets.automation import dead_runs
from llm_assets.automation.launched import PIPELINE_TAG
from llm_assets.cli.commands.cloud import machines
from llm_assets.cloud.jobs import batch_job, lease_of, tpu_job
from llm_assets.cloud.settings import (
    CLOUD_CONFIG_VARIABLE,
    GoogleCloudSettings,
    MachineSettings,
    cloud_config_path,
)
from llm_assets.pipes.service import Phase
from llm_assets.pipes.tpu_vm import TpuVms
from tests.llm_assets.cloud.conftest import pipeline_settings
from tests.stand_ins.google import BUCKET, CUDA_IMAGE, REGION, LocalGoogle
from tests.stand_ins.project import CPU, cloud_settings, cuda_image, machine, write_cloud
from tests.waiting import wait_until

STAGE = "machines of Google Batch"
TPU_STAGE = "TPU machines (queued resources)"
SLEEP = ["--launcher", "command", "--", "sleep", "600"]
RUN = "12345678-1234-1234-1234-123456789012"


@pytest.fixture
def settings(
    google: LocalGoogle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GoogleCloudSettings]:
    """A cloud project; after the test nothing may cost money."""
    content: dict[str, Any] = cloud_settings(google, replicas=2) | {"lease_hours": 3 / 3600}
    monkeypatch.setenv(CLOUD_CONFIG_VARIABLE, str(write_cloud(tmp_path, content)))
    google.images[CUDA_IMAGE] = cuda_image()
    yield GoogleCloudSettings.model_validate(content)
    wait_until(lambda: not google.batch.billing() and not google.tpu.billing())


@pytest.fixture
def on_tpu(settings: GoogleCloudSettings) -> GoogleCloudSettings:
    """The same project, whose training has a TPU machine of its own."""
    content = settings.model_dump(mode="json")
    content["training"] = machine("ct5lp-hightpu-4t") | {"zones": [f"{settings.region}-a"]}
    content["images"]["tpu"] = CUDA_IMAGE
    cloud_config_path().write_text(yaml.safe_dump(content))
    return GoogleCloudSettings.model_validate(content)


def start_tpu(google: LocalGoogle, settings: GoogleCloudSettings, run: str = RUN) -> TpuVms:
    """A job on a TPU machine as a run submits it; its lease is the run's to renew."""
    output = f"gs://{BUCKET}/left/output"
    files.write(lease_of(output), b"1")
    place = {"bucket": BUCKET, "key_prefix": "left"}
    session: Any = SimpleNamespace(message_reader_params=place, get_bootstrap_env_vars=dict)
    client = TpuVms.connect(REGION, google.endpoint)
    job = tpu_job(settings, settings.training, SLEEP, output)
    assert settings.tpu_parent is not None
    service = TpuVms(client, settings.tpu_parent, job)
    labels = {"pipeskey": "left", "dagster-run-id": run}
    files.remove(f"gs://{BUCKET}/left/machine.json")
    service.submit("left", labels, session)
    wait_until(lambda: service.find()[0].phase is Phase.RUNNING)
    return service


def start(google: LocalGoogle, settings: GoogleCloudSettings, run: str = RUN) -> Job:
    """A job as a run submits it, on two machines; its lease is the run's to renew."""
    client = BatchServiceClient(client_options={"api_endpoint": google.endpoint})
    output = f"gs://{BUCKET}/left/output"
    files.write(lease_of(output), b"1")
    given = Job(batch_job(settings, settings.training, SLEEP, output))
    given.labels = {"pipeskey": "left", "dagster-run-id": run}
    made = client.create_job(parent=settings.parent, job_id="left", job=given)
    wait_until(lambda: google.batch.jobs()[0].status.state.name == "RUNNING")
    return made


@pytest.mark.fault(
    TPU_STAGE,
    "Dagster gone for good",
    sees="why, in the job's log",
    then="after `lease_hours`, the program saves its state, and the machine deletes itself",
)
def test_tpu_machine_whose_lease_nobody_renews_deletes_itself(
    google: LocalGoogle, on_tpu: GoogleCloudSettings
) -> None:
    service = start_tpu(google, on_tpu)
    wait_until(lambda: service.find()[0].phase.ended and not service.find()[0].holds_machines)
    (job,) = service.find()
    assert google.tpu.billing() == []
    assert "No run has renewed" in google.tpu.log(job.name)
    # That of a program which dies of SIGTERM, as `sleep` does.
    assert (job.phase, job.exit_status, job.holds_machines) == (Phase.FAILED, 143, False)


@pytest.mark.fault(
    TPU_STAGE,
    "job left behind by Dagster on another machine",
    sees="what it costs so far",
    then="`llm-assets machines --end` ends it",
)
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"zones": ["us-central1-f"]},
        {"machine_type": "n1-standard-4", "zones": []},
    ],
    ids=["as it was", "zone", "machine"],
)
def test_sweep_lists_a_tpu_machine_and_deletes_it(
    google: LocalGoogle, on_tpu: GoogleCloudSettings, changed: dict[str, Any]
) -> None:
    start_tpu(google, long_leased(on_tpu))
    content = on_tpu.model_dump(mode="json")
    content["training"] |= changed
    content["cost"]["prices"] = {"ct5lp-hightpu-4t": 3600.0}
    cloud_config_path().write_text(yaml.safe_dump(content))
    google.tpu.refused_deletions = 2
    listed = CliRunner().invoke(machines, [])
    assert "left (Cloud TPU): running, 1 v5litepod-4, submitted 2" in listed.output, listed.output
    assert "USD so far" in listed.output, "whatever the training's machine is now"
    ended = CliRunner().invoke(machines, ["--end"])
    assert "Ended: 1." in ended.output and google.tpu.billing() == google.tpu.jobs() == []


OFF = "Google Batch API has not been used in project 1 before or it is disabled."


@pytest.mark.fault(
    TPU_STAGE,
    "another service {why} when machines are ended",
    sees="{told}",
    then="the jobs of the other services are ended",
)
@pytest.mark.parametrize(
    ("why", "message", "told"),
    [
        (
            "refuses to list its jobs",
            "Permission denied.",
            "which service, and the role to ask for",
        ),
        ("is not enabled", OFF, "nothing"),
    ],
)
def test_sweep_goes_on_past_a_service_that_does_not_answer(
    google: LocalGoogle, on_tpu: GoogleCloudSettings, why: str, message: str, told: str
) -> None:
    start_tpu(google, long_leased(on_tpu))
    denied = grpc.StatusCode.PERMISSION_DENIED
    google.server.faults.add("ListJobs", denied, message, times=2)
    listed = CliRunner().invoke(machines, ["--json"])
    assert [job["job"].rpartition("/")[2] for job in json.loads(listed.stdout)] == ["left"]
    ended = CliRunner().invoke(machines, ["--end"])
    assert "Ended: 1." in ended.output and google.tpu.billing() == [], why
    if told == "nothing":
        assert (listed.exit_code, ended.exit_code) == (0, 0)
        return
    for result in (listed, ended):
        assert result.exit_code == 1 and isinstance(result.exception, UserError)
        assert "Google Batch refused to list its jobs (403)" in str(result.exception)
        assert "roles/batch.jobsEditor" in str(result.exception)


@pytest.mark.fault(
    STAGE,
    "no permission to end one of the jobs",
    sees="which job, and the role to ask for",
    then="the other jobs are ended",
)
def test_sweep_goes_on_past_a_job_that_cannot_be_ended(
    google: LocalGoogle, on_tpu: GoogleCloudSettings
) -> None:
    start(google, long_leased(on_tpu.model_copy(update={"training": MachineSettings(**CPU)})))
    start_tpu(google, long_leased(on_tpu))
    google.server.faults.add("DeleteJob", grpc.StatusCode.PERMISSION_DENIED, "Permission denied.")
    ended = CliRunner().invoke(machines, ["--end"])
    assert "Ended: 1." in ended.output and google.tpu.billing() == []
    assert len(google.batch.billing()) == 1 and ended.exit_code == 1
    assert "refused to end projects/local-project" in str(ended.exception)
    assert "/jobs/left (403)" in str(ended.exception)
    again = CliRunner().invoke(machines, ["--end"])
    assert "Ended: 1." in again.output and again.exit_code == 0


def long_leased(settings: GoogleCloudSettings) -> GoogleCloudSettings:
    return settings.model_copy(update={"lease_hours": 12.0})


@pytest.mark.fault(
    STAGE,
    "Dagster gone for good",
    sees="why, in the job's log",
    then="after `lease_hours`, the job saves its state and ends with its machines",
)
def test_machines_whose_lease_nobody_renews_end_themselves(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    made = start(google, settings)
    wait_until(lambda: not google.batch.billing())
    assert any("No run has renewed" in log for log in google.batch.logs(made.name))


@pytest.mark.fault(
    STAGE,
    "job left behind by Dagster on another machine",
    sees="what it costs so far",
    then="`llm-assets machines --end` ends it",
)
def test_sweep_lists_what_costs_money_and_ends_it(
    google: LocalGoogle, settings: GoogleCloudSettings
) -> None:
    start(google, long_leased(settings))
    google.batch.refused_deletions = 2
    listed = CliRunner().invoke(machines, [])
    shown = "left (Google Batch): running, 2 n1-standard-4, submitted"
    for said in (shown, " UTC by run 12345678, ", "USD so far", "machines --end"):
        assert said in listed.output, listed.output
    (told,) = json.loads(CliRunner().invoke(machines, ["--json"], catch_exceptions=False).stdout)
    assert told["machines"] == 2 and told["dollars"] > 0 and not told["ended"]
    assert len(google.batch.billing()) == 2
    ended = CliRunner().invoke(machines, ["--end"])
    assert "Ended: 1." in ended.output and google.batch.billing() == []
    assert "No job of this project's runs is active." in CliRunner().invoke(machines, []).output


@pytest.mark.fault(
    "{stage}",
    "run killed, and no other run follows its job",
    sees="which jobs were ended, in the sensor's tick",
    then="the job is ended after ten minutes",
)
@pytest.mark.parametrize(
    ("stage", "runner"), [(STAGE, "google_batch"), (TPU_STAGE, "tpu_vm")], ids=["batch", "tpu"]
)
def test_sensor_ends_what_a_dead_run_left_behind_and_nothing_else(
    google: LocalGoogle,
    settings: GoogleCloudSettings,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    runner: str,
) -> None:
    store = f"gs://{BUCKET}/store"
    pipeline = pipeline_settings(platform="local", store=store, training={"runner": runner})
    sensor = dead_runs.build_dead_run_sensors(pipeline)[1]
    billing = google.tpu.billing if stage == TPU_STAGE else google.batch.billing
    with DagsterInstance.ephemeral() as instance:
        tags = {PIPELINE_TAG: "manual"}
        run = _run(instance, tags)
        if stage == TPU_STAGE:
            on_tpu: GoogleCloudSettings = request.getfixturevalue("on_tpu")
            start_tpu(google, long_leased(on_tpu), run.run_id)
        else:
            start(google, long_leased(settings), run.run_id)

        def tick() -> str | None:
            context = build_sensor_context(instance)
            reason = sensor(context)
            assert isinstance(reason, SkipReason)
            return reason.skip_message

        assert not tick() and billing()
        instance.report_run_failed(run, "killed")
        assert not tick() and billing(), "another run may follow it"
        monkeypatch.setattr(dead_runs, "ADOPTION_SECONDS", 0.0)
        denied = grpc.StatusCode.PERMISSION_DENIED
        google.server.faults.add("ListCustomJobs", denied, "Permission denied.")
        with pytest.raises(Failure) as failed:
            tick()
        told = failed.value.description or ""
        assert "Ended: projects/" in told and "aiplatform" in told
        assert billing() == [] and not tick()


@op
def nothing() -> None:
    """Does nothing."""


@job
def training() -> None:
    """A run's job."""
    nothing()


def _run(instance: DagsterInstance, tags: dict[str, str]) -> DagsterRun:
    """A run that has started."""
    return instance.create_run_for_job(training, status=DagsterRunStatus.STARTED, tags=tags)
