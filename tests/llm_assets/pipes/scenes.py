"""A run and its job on one of the services, as both may end."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance, ExecuteInProcessResult

from llm_assets.cloud.settings import GoogleCloudSettings
from llm_assets.cloud.spending import Spending
from llm_assets.pipes import Limits
from llm_assets.pipes.dataproc_serverless import DataprocBatches
from llm_assets.pipes.google_batch import BatchJobs
from llm_assets.pipes.service import Phase, RemoteJob, RemoteService
from llm_assets.pipes.tpu_vm import TpuVms
from llm_assets.pipes.vertex_custom_job import VertexCustomJobs
from tests.forked import ForkedProcess
from tests.llm_assets.pipes.runner import QUICK, Runner, failure_text, log_text
from tests.stand_ins.google import PROJECT, REGION, LocalGoogle
from tests.stand_ins.project import cloud_settings
from tests.waiting import wait_until

SHORT = Limits(poll_seconds=0.2, pending_seconds=1.0)
RESTARTED = "restarted on new machines, from the newest checkpoint"


@dataclass(frozen=True)
class Service:
    """One of Google's services."""

    name: str
    stage: str
    """Of docs/reliability.md."""
    kind: type[RemoteService]
    cancel_method: str
    removed: str
    """What becomes of a job that is to end."""
    again: str = RESTARTED
    """What becomes of one that ended by no fault of its own."""

    def __str__(self) -> str:
        return self.name


BATCH = Service("batch", "machines of Google Batch", BatchJobs, "DeleteJob", "the job is deleted")
TPU = Service(
    "tpu", "TPU machines (queued resources)", TpuVms, "DeleteQueuedResource", "the job is deleted"
)
OWN = (BATCH, TPU)
VERTEX = Service(
    "vertex", "jobs of Vertex AI", VertexCustomJobs, "CancelCustomJob", "the job is canceled"
)
DATAPROC = Service(
    "dataproc",
    "batches of Dataproc Serverless",
    DataprocBatches,
    "CancelOperation",
    "the job is canceled",
    "the run fails; the next run submits a new job",
)
MACHINES = (BATCH, pytest.param(TPU, marks=pytest.mark.soak, id="tpu"))
"""A TPU's machines end as those of Batch do, by the same code but for the requests."""
SPARK = pytest.param(DATAPROC, marks=pytest.mark.soak, id="dataproc")
"""Starts Java for each job."""
ALIKE = (*MACHINES, pytest.param(VERTEX, marks=pytest.mark.soak, id="vertex"))
"""For what is done by the same code whatever the service, but for requests that others try."""


@dataclass
class Scene:
    """A run, its job and what the job's program has begun."""

    service: Service
    runner: Runner
    google: LocalGoogle
    starts: Path
    """A line for each start of the program."""

    def __post_init__(self) -> None:
        client = self.service.kind.connect(REGION, self.google.endpoint)
        self.remote = self.service.kind(client, f"projects/{PROJECT}/locations/{self.runner.place}")

    def run(self, *steps: str, **changes: Any) -> ExecuteInProcessResult:
        """Do the work in a Dagster run, which may fail."""
        self.instance = DagsterInstance.ephemeral()
        return self.runner.changed(**changes).run(self._work(steps), self.instance)

    def start(self, *steps: str, until: Phase | None = None, killed_at: str = "") -> ForkedProcess:
        """Do it in a Dagster process of its own, and wait until its job has come so far."""
        process = self.runner.start_process(self._work(steps), killed_at)
        if until:
            wait_until(lambda: until in self.phases())
        if until is Phase.RUNNING:
            wait_until(self.started)
        return process

    def _work(self, steps: tuple[str, ...]) -> list[str]:
        return ["--count", str(self.starts), "log:begun", *steps, "materialize"]

    def started(self) -> int:
        """How often the program was started."""
        return len(self.starts.read_text().splitlines()) if self.starts.exists() else 0

    def jobs(self) -> list[RemoteJob]:
        """All jobs that the service still knows."""
        return [self.remote.describe(job) for job in self.runner.jobs()]

    def phases(self) -> list[Phase]:
        return [job.phase for job in self.jobs()]

    def once_started(self, action: Callable[[], object]) -> None:
        """Do something as soon as the program runs."""

        def wait_and_act() -> None:
            wait_until(lambda: self.phases() == [Phase.RUNNING] and self.started())
            time.sleep(5 * QUICK.poll_seconds)
            action()

        threading.Thread(target=wait_and_act, daemon=True).start()

    def left(self) -> list[Any]:
        """What costs money, or will: jobs that have not ended, and machines."""
        waiting = [phase for phase in self.phases() if not phase.ended]
        return [*self.runner.stand_in.billing(), *waiting]

    def ends(self, starts: int | None) -> None:
        """Nothing is left, and the work is done when it is asked for again, with all it reported.

        Args:
            starts: of the program in all; None where two may begin at once.
        """
        wait_until(lambda: not self.left(), told=lambda: str(self.left()))
        done = self.run()
        assert done.success, failure_text(done)
        (event,) = done.asset_materializations_for_node("figures")
        last = event.metadata["start"].value
        assert f"begun (start {last})" in log_text(self.instance, done)
        assert starts in (None, self.started()) and starts in (None, last)
        wait_until(lambda: not self.left(), told=lambda: str(self.left()))


def scene_fault(fault: str, sees: str, then: str) -> pytest.MarkDecorator:
    return pytest.mark.fault("{scene.stage}", fault, sees=sees, then=then)


def only(*services: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("scene", services, indirect=True, ids=str)


def spending(scene: Scene, machines: int, **limits: float) -> Spending:
    """Of jobs whose machines cost a dollar a second."""
    content = cloud_settings(scene.google) | {"cost": limits}
    settings = GoogleCloudSettings.model_validate(content)
    return Spending(settings, "n1-standard-4", 3600.0, machines, "run")
