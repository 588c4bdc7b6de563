"""Runs an asset whose work is one job of the local Google."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dagster import (
    AssetExecutionContext,
    DagsterInstance,
    ExecuteInProcessResult,
    MaterializeResult,
    asset,
    materialize,
)

from llm_assets.assets.stage import user_faults
from llm_assets.pipes import (
    Limits,
    PipesDataprocServerlessClient,
    PipesGCSLiveMessageReader,
    PipesGoogleBatchClient,
    PipesTpuVmClient,
    PipesVertexCustomJobClient,
    RetryPolicy,
)
from llm_assets.pipes.remote_job import RemoteJobPipesClient, RemoteRun
from tests.forked import ForkedProcess, Surroundings
from tests.stand_ins.google import BUCKET, CUDA_IMAGE, PROJECT, REGION, LocalGoogle
from tests.stand_ins.processes import REPOSITORY

PROGRAM = Path(__file__).parent / "programs" / "report.py"
CLIENTS: dict[str, type[RemoteJobPipesClient]] = {
    "vertex": PipesVertexCustomJobClient,
    "dataproc": PipesDataprocServerlessClient,
    "batch": PipesGoogleBatchClient,
    "tpu": PipesTpuVmClient,
}
QUICK = Limits(
    poll_seconds=0.1,
    reason_seconds=10.0,
    drain_seconds=2.0,
    restarts=2,
    restart_delay_seconds=0.1,
    retries=RetryPolicy(0.05, 0.2, give_up_after_seconds=60.0),
)


@dataclass
class Runner:
    """Runs an asset whose work is one job of either service, in a Dagster run of its own."""

    service: str
    google: LocalGoogle | None = None
    endpoint: str = field(default_factory=lambda: os.environ["LOCAL_GOOGLE_ENDPOINT"])
    limits: Limits = QUICK
    bucket: str = BUCKET
    region: str = REGION
    image: str = CUDA_IMAGE
    fingerprint: str | None = "f1"
    scheduling: dict[str, Any] = field(default_factory=dict)
    machines: int = 1
    """Of a job of Google Batch."""
    accept_succeeded: Callable[[], bool] = lambda: True
    output: Path = Path(os.devnull)
    """Where Dagster processes of their own print to."""

    def changed(self, **changes: Any) -> "Runner":
        """A runner with some fields changed."""
        return replace(self, **changes)

    def run(
        self, steps: Sequence[str], instance: DagsterInstance | None = None
    ) -> ExecuteInProcessResult:
        """Materialize the asset; the run fails, it does not raise."""
        instance = instance or DagsterInstance.ephemeral()
        return materialize([self.asset(steps)], instance=instance, raise_on_error=False)

    def start_process(self, steps: Sequence[str], killed_at: str = "") -> ForkedProcess:
        """Run in a Dagster process of its own; exit status 0 where the run succeeded.

        Args:
            killed_at: the method of `RemoteRun` at whose call the process is killed.
        """
        command = ["materialize", self.service, self.fingerprint or "", killed_at, *steps]
        surroundings = Surroundings(REPOSITORY, dict(os.environ), self.output)
        return ForkedProcess(_materialize, command, surroundings)

    def asset(self, steps: Sequence[str]) -> Any:
        """An asset that runs the test program with these steps, as a stage does."""

        @asset(name="figures")
        def figures(context: AssetExecutionContext) -> MaterializeResult:
            with user_faults():
                done = self.invoke(context, steps)
            return done.get_materialize_result(implicit_materialization=False)

        return figures

    def invoke(self, context: AssetExecutionContext, steps: Sequence[str]) -> Any:
        """Call the client under test."""
        common: dict[str, Any] = {
            "context": context,
            "parent": f"projects/{PROJECT}/locations/{self.place}",
            "fingerprint": self.fingerprint,
            "accept_succeeded": self.accept_succeeded,
        }
        describe = {
            "vertex": self.custom_job,
            "dataproc": self.batch,
            "batch": self.machines_job,
            "tpu": self.tpu_job,
        }[self.service]
        return self.client().run(job=describe(steps), **common)

    @property
    def place(self) -> str:
        """Where the service's jobs are made: a region, or a zone of it."""
        return f"{self.region}-a" if self.service == "tpu" else self.region

    def client(self) -> RemoteJobPipesClient:
        """The client under test."""
        kind = CLIENTS[self.service]
        reader = PipesGCSLiveMessageReader(bucket=self.bucket, prefix="messages")
        return kind(reader, kind.jobs.connect(self.region, self.endpoint), limits=self.limits)

    def tpu_job(self, steps: Sequence[str]) -> dict[str, Any]:
        node = {"accelerator_type": "v5litepod-4", "runtime_version": "v2-alpha-tpuv5-lite"}
        resource = {"tpu": {"node_spec": [{"node": node}]}, "spot": {}}
        arguments = [str(PROGRAM), *steps]
        container = {"image": self.image, "arguments": arguments, "environment": {}}
        return {
            "queued_resource": resource,
            "container": container | {"seconds": 3600} | self.scheduling,
        }

    def machines_job(self, steps: Sequence[str]) -> dict[str, Any]:
        container = {
            "image_uri": self.image,
            "entrypoint": sys.executable,
            "commands": [str(PROGRAM), *steps],
        }
        task = {"runnables": [{"container": container}], **self.scheduling}
        return {"task_groups": [{"task_spec": task, "task_count": self.machines}]}

    def custom_job(self, steps: Sequence[str]) -> dict[str, Any]:
        pool = {
            "replica_count": 1,
            "machine_spec": {"machine_type": "n1-standard-4"},
            "container_spec": {
                "image_uri": self.image,
                "command": [sys.executable, str(PROGRAM)],
                "args": list(steps),
            },
        }
        return {"job_spec": {"worker_pool_specs": [pool], "scheduling": self.scheduling}}

    def batch(self, steps: Sequence[str]) -> dict[str, Any]:
        image = "" if self.image == CUDA_IMAGE else self.image
        uri = f"gs://{BUCKET}/report.py"
        return {
            "pyspark_batch": {"main_python_file_uri": uri, "args": list(steps)},
            "runtime_config": {"version": "2.3", "container_image": image},
        }

    @property
    def stand_in(self) -> Any:
        """Of the service."""
        return getattr(self.google, self.service)

    def jobs(self) -> list[Any]:
        """The service's jobs, oldest first."""
        return self.stand_in.jobs()

    @property
    def create_method(self) -> str:
        methods = {"vertex": "CreateCustomJob", "batch": "CreateJob", "dataproc": "CreateBatch"}
        return methods.get(self.service, "CreateQueuedResource")

    @property
    def get_method(self) -> str:
        return self.create_method.replace("Create", "Get")

    def hold_pending(self, hold: bool = True) -> None:
        """Leave jobs without machines, or give them some."""
        self.stand_in.hold_pending = hold


def _materialize() -> None:
    """What `start_process` runs."""
    service, fingerprint, killed_at, *steps = sys.argv[1:]
    if killed_at:
        setattr(RemoteRun, killed_at, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    result = Runner(service, fingerprint=fingerprint).run(steps)
    sys.exit(0 if result.success else 1)


def failure_text(result: ExecuteInProcessResult) -> str:
    """The failed step's own words."""
    failures = result.get_step_failure_events()
    data = failures[0].step_failure_data
    assert data.user_failure_data is not None, data.error
    return data.user_failure_data.description or ""


def log_text(instance: DagsterInstance, result: ExecuteInProcessResult) -> str:
    """Everything logged in a run."""
    return "\n".join(record.user_message for record in instance.all_logs(result.run_id))
