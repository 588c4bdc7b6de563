"""What the Pipes client for Vertex AI adds to a job, against dagster-gcp's own message reader.

Both submit the same program to the local Google and follow it. Counted is what the client adds: the
time until the job is submitted, and the time from the program's first log line to its place in the
Dagster run. The machine that waits for a job is to have its processor for other things.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from dagster import (
    AssetExecutionContext,
    DagsterInstance,
    PipesEnvContextInjector,
    asset,
    materialize,
    open_pipes_session,
)

from benchmarks.harness import alternate, at_most, record
from llm_assets.pipes import Limits
from tests.llm_assets.pipes.runner import Runner
from tests.stand_ins.google import BUCKET, PROJECT, LocalGoogle, running_local_google

ROUNDS = 3
WAIT_SECONDS = 90.0
LINE = "the first line"
WAIT_PROGRAM = """
import sys
from llm_assets.pipes import Limits
from tests.llm_assets.pipes.runner import Runner
Runner("vertex", fingerprint="wait", limits=Limits()).run([f"log:{sys.argv[1]}", "sleep:600"])
"""


def added_seconds(google: LocalGoogle, run: Callable[[list[str]], DagsterInstance]) -> float:
    """Seconds before the job is submitted, and from its line to the line's place in the run."""
    google.reset()
    with tempfile.TemporaryDirectory() as folder:
        stamp = Path(folder) / "stamp"
        started = time.time()
        instance = run([f"stamp:{stamp}", f"log:{LINE}", "sleep:3", "materialize"])
        said = float(stamp.read_text())
    (job,) = google.vertex.jobs()
    submitted = job.create_time.timestamp() - started
    (record,) = instance.get_run_records()
    arrived = next(
        entry.timestamp
        for entry in instance.all_logs(record.dagster_run.run_id)
        if LINE in (entry.user_message or "")
    )
    return submitted + arrived - said


def ours(steps: list[str]) -> DagsterInstance:
    """This project's client, with its default limits."""
    instance = DagsterInstance.ephemeral()
    name = f"f{time.time_ns()}"
    assert Runner("vertex", fingerprint=name, limits=Limits()).run(steps, instance).success
    return instance


def shipped(steps: list[str]) -> DagsterInstance:
    """dagster-gcp's reader around a job that Google's client submits."""
    from dagster_gcp.pipes import PipesGCSMessageReader
    from google.cloud import storage
    from google.cloud.aiplatform_v1 import CustomJob, JobServiceClient

    runner = Runner("vertex")
    parent = f"projects/{PROJECT}/locations/{runner.place}"
    client = JobServiceClient(client_options={"api_endpoint": runner.endpoint})

    @asset
    def figures(context: AssetExecutionContext) -> Any:
        reader = PipesGCSMessageReader(bucket=BUCKET, client=storage.Client())
        injector = PipesEnvContextInjector()
        with open_pipes_session(
            context=context, message_reader=reader, context_injector=injector
        ) as session:
            job = CustomJob(runner.custom_job(steps) | {"display_name": "shipped"})
            variables = session.get_bootstrap_env_vars().items()
            (pool,) = job.job_spec.worker_pool_specs
            pool.container_spec.env = [{"name": key, "value": text} for key, text in variables]
            name = client.create_custom_job(parent=parent, custom_job=job).name
            while client.get_custom_job(name=name).state.name != "JOB_STATE_SUCCEEDED":
                time.sleep(1.0)
        yield from session.get_results()

    instance = DagsterInstance.ephemeral()
    assert materialize([figures], instance=instance).success
    return instance


def waiting_share() -> float:
    """Share of one core that a Dagster process takes while its job runs."""
    command = [sys.executable, "-c", WAIT_PROGRAM, LINE]
    waiting = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process = psutil.Process(waiting.pid)
        # Submission, the first lines and the growing of the pauses are over by then.
        time.sleep(WAIT_SECONDS / 2)
        before, since = sum(process.cpu_times()[:2]), time.perf_counter()
        time.sleep(WAIT_SECONDS)
        return (sum(process.cpu_times()[:2]) - before) / (time.perf_counter() - since)
    finally:
        waiting.terminate()
        waiting.wait()


def main() -> None:
    """Follow jobs in turn, then wait for one."""
    with running_local_google() as google:
        our_seconds, peer_seconds = alternate(
            lambda: added_seconds(google, ours), lambda: added_seconds(google, shipped), ROUNDS
        )
        google.reset()
        share = waiting_share()
    checks = {
        "time added to submission and to the first log line, slowest of 3": at_most(
            max(our_seconds), 2.0, "s"
        ),
        "share of a core while waiting": at_most(share, 0.01),
    }
    packages = ["dagster", "dagster-gcp", "google-cloud-aiplatform"]
    peer = "dagster-gcp's message reader around Google's client"
    record("pipes_clients", our_seconds, peer_seconds, "s", peer, "lower", packages, checks)


if __name__ == "__main__":
    main()
