"""Vertex AI custom jobs: one real process a replica, with what Google puts into its environment."""

import itertools
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from google.cloud import aiplatform_v1
from google.protobuf import empty_pb2
from google.rpc import code_pb2, status_pb2

from tests.stand_ins.faults import invalid
from tests.stand_ins.job_rules import check_job
from tests.stand_ins.machine_service import POLL_SECONDS, JobService, matches_labels, now
from tests.stand_ins.processes import RealProcess, free_port

PROJECT_NUMBER = "123456789012"
State = aiplatform_v1.JobState
ENDED = (
    State.JOB_STATE_SUCCEEDED,
    State.JOB_STATE_FAILED,
    State.JOB_STATE_CANCELLED,
    State.JOB_STATE_EXPIRED,
)
BETWEEN_REPLICAS_SECONDS = 0.3
REASON_SECONDS = 0.5
"""A job's error is set some time after its state; Google takes up to a minute."""


@dataclass
class RunningJob:
    """A job and the processes of its replicas."""

    job: aiplatform_v1.CustomJob
    replicas: dict[str, RealProcess] = field(default_factory=dict)
    restart: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    starts: int = 0
    machines: dict[str, str] = field(default_factory=dict)
    """Replica to the name of its machine, which is another one after a restart."""


class VertexJobs(JobService[RunningJob]):
    """The job service of one region."""

    def __init__(self, region: str, *parts: Any) -> None:
        super().__init__(*parts)
        self._region = region
        self._machine_numbers = itertools.count()

    def _clear(self) -> None:
        super()._clear()
        self.hold_queued = False
        """Leave new jobs QUEUED, as where the project's quota is used up (page "Understand the
        custom training service", "Queue a new job"): over quota, none is refused."""
        self.out_of_stock = 0
        """How many of the next jobs fail since the region has no machines."""
        self.cancel_seconds = 0.0
        """How long a job is being cancelled before it is."""

    def billing(self) -> list[RealProcess]:
        """The replicas that run."""
        replicas = [p for running in self._made.values() for p in [*running.replicas.values()]]
        return [process for process in replicas if process.poll() is None]

    def starts(self, name: str) -> int:
        """How often a job's replicas were started."""
        return self._made[name].starts

    def logs(self, name: str) -> dict[str, str]:
        """What each replica (`workerpool0-0`) printed."""
        return {key: process.log() for key, process in self._made[name].replicas.items()}

    def preempt(self, name: str) -> None:
        """Take the machines away: the job starts again where it asked for that, else it fails."""
        running = self._made[name]
        # Those of now: once the restart is asked for, new ones take their places.
        replicas = [(running.machines[key], p) for key, p in running.replicas.items()]
        restarts = running.job.job_spec.scheduling.restart_job_on_worker_restart
        if restarts:
            running.restart.set()
        else:
            self._end(
                running,
                State.JOB_STATE_FAILED,
                "Replica workerpool0-0 was preempted.",
                code_pb2.ABORTED,
            )
        for machine, process in replicas:
            self._mount.lose(machine)
            process.end()

    def create_custom_job(self, request: aiplatform_v1.CreateCustomJobRequest) -> Any:
        region = request.parent.split("/")[3]
        if region != self._region:
            text = f"The location ID in the resource name ({region}) does not match the endpoint's"
            raise invalid(f"{text} ({self._region}).")
        job = aiplatform_v1.CustomJob(request.custom_job)
        check_job(job)
        with self._lock:
            number = next(self._numbers)
            # Names that come back hold the project's number, whatever the request called it.
            job.name = f"projects/{PROJECT_NUMBER}/locations/{region}/customJobs/{number}"
            job.state = State.JOB_STATE_PENDING
            job.create_time = now()
            running = self._made[job.name] = RunningJob(job)
        if self.hold_queued:
            job.state = State.JOB_STATE_QUEUED
        else:
            threading.Thread(target=self._run, args=(running,), daemon=True).start()
        return aiplatform_v1.CustomJob(job)

    def get_custom_job(self, request: aiplatform_v1.GetCustomJobRequest) -> Any:
        return aiplatform_v1.CustomJob(self._find(request.name).job)

    def list_custom_jobs(self, request: aiplatform_v1.ListCustomJobsRequest) -> Any:
        found = [job for job in self.jobs() if matches_labels(request.filter, job.labels)]
        return aiplatform_v1.ListCustomJobsResponse(custom_jobs=found[::-1])

    def cancel_custom_job(self, request: aiplatform_v1.CancelCustomJobRequest) -> Any:
        running = self._find(request.name)
        if self.cancel_seconds:
            running.job.state = State.JOB_STATE_CANCELLING
            threading.Timer(self.cancel_seconds, self._cancel, (running,)).start()
        else:
            self._cancel(running)
        return empty_pb2.Empty()

    def _cancel(self, running: RunningJob) -> None:
        self._end(running, State.JOB_STATE_CANCELLED, "Cancelled.", code_pb2.CANCELLED)
        self._take_down(running)

    def _take_down(self, running: RunningJob) -> None:
        with self._lock:
            running.cancelled.set()
            for process in running.replicas.values():
                process.end()

    def _end(self, running: RunningJob, state: State, message: str = "", code: int = 0) -> None:
        with self._lock:
            if running.job.state in ENDED:
                return
            running.job.end_time = now()
            running.job.state = state
        if message:
            error = status_pb2.Status(code=code, message=message)
            threading.Timer(REASON_SECONDS, setattr, (running.job, "error", error)).start()

    def _run(self, running: RunningJob) -> None:
        while self.hold_pending and running.job.state not in ENDED:
            if running.cancelled.wait(POLL_SECONDS):
                return
        if running.job.state in ENDED:
            return
        if self.out_of_stock:
            self.out_of_stock -= 1
            message = f"Resources are insufficient in region: {self._region}. Please try a "
            message += "different region or use a different accelerator."
            self._end(running, State.JOB_STATE_FAILED, message, code_pb2.RESOURCE_EXHAUSTED)
            return
        for pool in running.job.job_spec.worker_pool_specs:
            uri = pool.container_spec.image_uri
            if uri not in self._images:
                self._end(
                    running,
                    State.JOB_STATE_FAILED,
                    f"Failed to pull image {uri}: not found.",
                    code_pb2.NOT_FOUND,
                )
                return
        while not running.cancelled.is_set():
            self._mount.pull()
            self._start_replicas(running)
            if not self._watch(running):
                return

    def _start_replicas(self, running: RunningJob) -> None:
        """Start each replica once its machine is there, the primary's last.

        Page "Understand the custom training service", "Start workers in parallel": the job is
        RUNNING when all are there.
        """
        running.restart.clear()
        running.starts += 1
        # Replicas share this machine's loopback, whatever their names in CLUSTER_SPEC.
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        rendezvous["GLOO_SOCKET_IFNAME"] = "lo"
        pools = list(enumerate(running.job.job_spec.worker_pool_specs))
        for number, pool in reversed(pools):
            for index in range(pool.replica_count):
                with self._lock:
                    if running.cancelled.is_set():
                        return
                    self._start(running, number, index, rendezvous)
                time.sleep(BETWEEN_REPLICAS_SECONDS)
        with self._lock:
            if not running.cancelled.is_set():
                running.job.start_time = now()
                running.job.state = State.JOB_STATE_RUNNING

    def _start(
        self, running: RunningJob, number: int, index: int, rendezvous: dict[str, str]
    ) -> None:
        job = running.job
        key = f"workerpool{number}-{index}"
        container = job.job_spec.worker_pool_specs[number].container_spec
        image = self._images[container.image_uri]
        running.machines[key] = f"machine-{next(self._machine_numbers)}"
        buckets = self._mount.view(running.machines[key])
        environment = {
            **rendezvous,
            "CLUSTER_SPEC": json.dumps(cluster_spec(job, number, index)),
            **self._environment,
            **output_folders(job),
            **image.environment,
            **{variable.name: variable.value for variable in container.env},
            "GCS_MOUNT": image.place(buckets, "/gcs"),
        }
        folder = self._folder / job.name.rsplit("/", 1)[1]
        folder.mkdir(parents=True, exist_ok=True)
        command = [*(container.command or image.entrypoint), *container.args]
        log = folder / f"{key}.log"
        running.replicas[key] = image.start(command, environment, log, {buckets: "/gcs"})

    def _watch(self, running: RunningJob) -> bool:
        """Wait for the end; True where the replicas are to be started again."""
        while True:
            time.sleep(POLL_SECONDS)
            if running.restart.is_set():
                for process in list(running.replicas.values()):
                    process.end()
                return True
            if running.job.state in ENDED:
                return False
            ended = self._find_end(running)
            if ended is None:
                continue
            for process in running.replicas.values():
                process.end()
            self._mount.push()
            key, status = ended
            if status == 0:
                self._end(running, State.JOB_STATE_SUCCEEDED)
            else:
                message = (
                    f"The replica {key} exited with a non-zero status of {status}. To find out "
                    "more about why your job exited please check the logs."
                )
                self._end(running, State.JOB_STATE_FAILED, message, code_pb2.INTERNAL)
            return False

    def _find_end(self, running: RunningJob) -> tuple[str, int] | None:
        """The replica whose exit ends the job, and its status: the primary, or one that failed."""
        for key, process in running.replicas.items():
            status = process.poll()
            if status is None or running.restart.is_set():
                continue
            if status != 0 or key == "workerpool0-0":
                return key, status
        return None


def cluster_spec(job: aiplatform_v1.CustomJob, pool: int, index: int) -> dict[str, Any]:
    """CLUSTER_SPEC of one replica: all replicas by host name and port, and which of them it is."""
    job_id = job.name.rsplit("/", 1)[1]
    cluster = {
        f"workerpool{number}": [
            f"cmle-training-workerpool{number}-{job_id}-{replica}:2222"
            for replica in range(spec.replica_count)
        ]
        for number, spec in enumerate(job.job_spec.worker_pool_specs)
        if spec.replica_count
    }
    task = {"type": f"workerpool{pool}", "index": index}
    return {"cluster": cluster, "environment": "cloud", "task": task}


def output_folders(job: aiplatform_v1.CustomJob) -> dict[str, str]:
    """`CustomJobSpec.base_output_directory`: the variables that it sets, if it is there."""
    output = job.job_spec.base_output_directory.output_uri_prefix.rstrip("/")
    folders = {"MODEL_DIR": "model", "CHECKPOINT_DIR": "checkpoints", "TENSORBOARD_LOG_DIR": "logs"}
    return {f"AIP_{name}": f"{output}/{folder}/" for name, folder in folders.items() if output}
