"""The launcher inside real jobs of the local Vertex AI."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from google.cloud.aiplatform_v1 import CustomJob, JobServiceClient, JobState
from google.cloud.batch_v1 import BatchServiceClient, JobStatus

from artifacts.program import lifetime
from artifacts.storage import files
from llm_assets.cloud.jobs import batch_job
from llm_assets.cloud.settings import GoogleCloudSettings
from recipes.launcher import local
from tests.stand_ins.google import BUCKET, CUDA_IMAGE, PROJECT, REGION, LocalGoogle
from tests.stand_ins.processes import REPOSITORY
from tests.stand_ins.project import cloud_settings, cuda_image
from tests.waiting import WAIT_SECONDS, wait_until

SUM_RANKS = str(Path(__file__).parent / "sum_ranks.py")
LAUNCHER = [sys.executable, "-m", "recipes.launcher"]


def submit(
    google: LocalGoogle, arguments: list[str], replicas: int = 1, **variables: str
) -> CustomJob:
    """Run a job of `replicas` nodes to its end."""
    container: dict[str, Any] = {"image_uri": CUDA_IMAGE, "command": LAUNCHER, "args": arguments}
    container["env"] = [{"name": name, "value": value} for name, value in variables.items()]
    pool: dict[str, Any] = {
        "replica_count": 1,
        "machine_spec": {"machine_type": "n1-standard-4"},
        "container_spec": container,
    }
    job = {
        "display_name": "launcher",
        "job_spec": {
            "worker_pool_specs": [pool] * replicas,
            "base_output_directory": {"output_uri_prefix": f"gs://{BUCKET}/launcher"},
        },
    }
    client = JobServiceClient(client_options={"api_endpoint": google.endpoint})
    parent = f"projects/{PROJECT}/locations/{REGION}"
    submitted = client.create_custom_job(parent=parent, custom_job=job)

    def found() -> CustomJob:
        return client.get_custom_job(name=submitted.name)

    def has_ended() -> bool:
        # A failed job's reason comes after its state.
        job = found()
        return job.state == JobState.JOB_STATE_SUCCEEDED or bool(job.error.message)

    wait_until(has_ended, told=lambda: str(google.vertex.logs(submitted.name)))
    return found()


# Two machines of Vertex AI train in `tests/recipes/test_mounted_bucket.py`.
def test_two_machines_of_batch_train_together_under_torchrun(google: LocalGoogle) -> None:
    settings = GoogleCloudSettings.model_validate(cloud_settings(google, replicas=2))
    arguments = ["--processes", "1", "--", SUM_RANKS, "0"]
    given = batch_job(settings, settings.training, arguments, f"gs://{BUCKET}/batch")
    google.images[CUDA_IMAGE] = cuda_image()
    client = BatchServiceClient(client_options={"api_endpoint": google.endpoint})
    made = client.create_job(parent=settings.parent, job_id="launcher", job=given)
    ended = (JobStatus.State.SUCCEEDED, JobStatus.State.FAILED)
    wait_until(lambda: client.get_job(name=made.name).status.state in ended)
    job = client.get_job(name=made.name)
    assert job.status.state is JobStatus.State.SUCCEEDED, google.batch.logs(job.name)
    record = json.loads(files.read(f"gs://{BUCKET}/batch/model/sum.json"))
    assert (record["sum"], record["world"]) == (3, 2)


@pytest.mark.parametrize("status", [75, pytest.param(3, marks=pytest.mark.soak)])
def test_failed_training_never_exits_0(google: LocalGoogle, status: int) -> None:
    job = submit(google, ["--processes", "1", "--", SUM_RANKS, str(status)])
    assert job.state is JobState.JOB_STATE_FAILED
    expected = 75 if status == 75 else 1
    assert f"non-zero status of {expected}" in job.error.message


WRITE_KEY = (
    "import os, pathlib;"
    "pathlib.Path(os.environ['OUTPUT_FOLDER'], 'key').write_text(os.environ['THE_KEY'][::-1])"
)


def test_program_gets_a_secret_that_the_job_only_names(google: LocalGoogle) -> None:
    google.secrets.values["key"] = "hush-hush"
    name = f"projects/{PROJECT}/secrets/key/versions/latest"
    arguments = ["--launcher", "command", "--", sys.executable, "-c", WRITE_KEY]
    job = submit(google, arguments, SECRET_THE_KEY=name, API_ENDPOINT=google.endpoint)
    assert job.state is JobState.JOB_STATE_SUCCEEDED, google.vertex.logs(job.name)
    assert files.read(f"gs://{BUCKET}/launcher/model/key") == b"hsuh-hsuh"
    assert "hush-hush" not in f"{job} {google.vertex.logs(job.name)}"


def test_secret_that_may_not_be_read_ends_the_job_with_the_role_to_ask_for(
    google: LocalGoogle,
) -> None:
    name = f"projects/{PROJECT}/secrets/absent/versions/latest"
    arguments = ["--launcher", "command", "--", "true"]
    job = submit(google, arguments, SECRET_THE_KEY=name, API_ENDPOINT=google.endpoint)
    assert "status of 2" in job.error.message
    assert "roles/secretmanager.secretAccessor" in str(google.vertex.logs(job.name))


def test_machine_without_the_accelerators_that_are_paid_for_ends_at_once() -> None:
    process = launch("--accelerators", "64", "--", "-m", "this")
    _, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2
    assert "64 accelerator(s)" in errors and "driver" in errors


def launch(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*LAUNCHER, *arguments],
        cwd=REPOSITORY,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("code", "expected"),
    [("exit(7)", 7), ("import os; os.kill(0, 0)", 0), ("import os; os.kill(os.getpid(), 9)", 137)],
)
def test_users_own_command_keeps_its_exit_code(code: str, expected: int) -> None:
    process = launch("--launcher", "command", "--", sys.executable, "-c", code)
    assert process.wait(timeout=WAIT_SECONDS) == expected


def test_termination_is_passed_on_so_that_a_program_can_save() -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *a: sys.exit(75))\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)"
    )
    process = launch("--launcher", "command", "--", sys.executable, "-c", code)
    assert process.stdout is not None
    while process.stdout.readline().strip() != "ready":
        pass
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=WAIT_SECONDS) == 75


def test_idle_node_waits_and_ends_by_itself() -> None:
    started = time.monotonic()
    process = launch("--idle", "--idle-hours", "0.0005")
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0
    assert time.monotonic() - started > 1.8
    assert "web terminal" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name the program"),
        (["--processes", "none", "--", "x"], "--processes: has to be a number from 1, not 'none'"),
        (["--processes", "0", "--", "x"], "--processes: has to be a number from 1"),
        (["--accelerators", "-1", "--", "x"], "--accelerators: has to be a number from 0"),
        (["--idle", "--idle-hours", "nan"], "--idle-hours: has to be above 0, not nan"),
        (["--launcher", "command", "--", "/no/such/program"], "no program"),
        (["--spec", "/no/such/spec.json", "--", "x"], "no spec"),
        (["--spec", "/", "--", "x"], "The spec / cannot be read"),
        (["--ssh", "--", "x"], "--ssh is for --launcher deepspeed and --idle"),
        (["--launcher", "command", "--ssh", "--", "x"], "Leave --ssh out"),
    ],
)
def test_wrong_settings_end_with_one_clear_line(arguments: list[str], message: str) -> None:
    process = launch(*arguments)
    _, error = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 2
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize("workers", ["0", "-2", "two"])
def test_no_workers_at_all_are_no_success(
    workers: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["local", f"--workers={workers}", "--", "-c", "pass"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(lifetime, "end_with_parent", lambda: None)
    with pytest.raises(SystemExit, match="2"):
        local.main()
    assert f"has to be a number from 1, not '{workers}'" in capsys.readouterr().err
