"""Google Batch: real processes, one a task, on machines that bill until they are deleted."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from google.cloud import batch_v1

from tests.stand_ins.faults import already_exists
from tests.stand_ins.job_rules import check_machines_job
from tests.stand_ins.machine_service import (
    POLL_SECONDS,
    MachineService,
    MadeMachine,
    matches_labels,
    now,
)
from tests.stand_ins.processes import RealProcess, free_port

State = batch_v1.JobStatus.State
ENDED = (State.SUCCEEDED, State.FAILED, State.CANCELLED)
ZONE = "zones/{region}-a"
NO_MACHINES = (
    "VM in Managed Instance Group meets error: Batch Error: code - "
    "CODE_GCE_ZONE_RESOURCE_POOL_EXHAUSTED, description - error count is 4, latest message example:"
    " Instance creation failed: The zone '{zone}' does not have enough resources available to "
    "fulfill the request."
)
NO_QUOTA = (
    "VM in Managed Instance Group meets error: Batch Error: code - CODE_GCE_QUOTA_EXCEEDED, "
    "description - error count is 4, latest message example: Quota 'GPUS_ALL_REGIONS' exceeded. "
    "Limit: 0.0 globally."
)
REASONS = {
    50001: "due to Spot VM preemption",
    50002: "due to Batch no longer receives VM updates",
    50005: "due to task runs over the maximum run duration",
}
"""Page "Troubleshooting", "Task failure exit codes"."""


@dataclass
class BatchRun:
    """A job, its machines and the processes of its tasks."""

    job: batch_v1.Job
    machines: list[MadeMachine] = field(default_factory=list)
    tasks: list[RealProcess] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


class GoogleBatch(MachineService[BatchRun]):
    """The Batch service of all regions, and its bill."""

    def _clear(self) -> None:
        super()._clear()
        self.out_of_stock = False
        """Make all machines of new jobs but the last: of that there is none free."""

    def logs(self, name: str) -> list[str]:
        """What each task of a job printed."""
        return [task.log() for task in self._made[name].tasks]

    def preempt(self, name: str, code: int = 50001) -> None:
        """Take the first task's machine away, with one of Batch's own codes."""
        run = self._made[name]
        self._fail(run, 0, f"{REASONS[code]} with exit code {code}")
        self._take_down(run)

    def create_job(self, request: batch_v1.CreateJobRequest) -> Any:
        check_machines_job(request)
        name = f"{request.parent}/jobs/{request.job_id}"
        with self._lock:
            if name in self._made:
                raise already_exists(name)
            job = batch_v1.Job(request.job)
            job.name, job.uid = name, f"{request.job_id}-{next(self._numbers)}"
            job.create_time = job.update_time = now()
            job.status.state = State.QUEUED
            run = self._made[name] = BatchRun(job)
            made = batch_v1.Job(job)
        threading.Thread(target=self._run, args=(run,), daemon=True).start()
        return made

    def get_job(self, request: batch_v1.GetJobRequest) -> Any:
        return batch_v1.Job(self._find(request.name).job)

    def list_jobs(self, request: batch_v1.ListJobsRequest) -> Any:
        found = [job for job in self.jobs() if matches_labels(request.filter, job.labels)]
        return batch_v1.ListJobsResponse(jobs=found)

    def delete_job(self, request: batch_v1.DeleteJobRequest) -> Any:
        run = self._find(request.name)

        def mark() -> None:
            with self._lock:
                if run.job.status.state not in ENDED:
                    self._set(run, State.DELETION_IN_PROGRESS)

        return self._delete(request.name, mark)

    def _set(self, run: BatchRun, state: Any, why: str = "") -> None:
        """Change a job's state, with the event that Google writes."""
        job = run.job
        text = f"Job state is set from {job.status.state.name} to {state.name} for job {job.name}."
        job.status.state = state
        job.update_time = now()
        self._tell(run, text + why)

    def _tell(self, run: BatchRun, text: str) -> None:
        event = batch_v1.StatusEvent(type_="STATUS_CHANGED", description=text, event_time=now())
        run.job.status.status_events.append(event)

    def _end(self, run: BatchRun, state: State, why: str = "") -> None:
        with self._lock:
            if run.job.status.state not in (*ENDED, State.DELETION_IN_PROGRESS):
                self._set(run, state, why)

    def _fail(self, run: BatchRun, index: int, why: str) -> None:
        region = run.job.name.split("/")[3]
        self._end(
            run,
            State.FAILED,
            f" Job failed due to task failure. Specifically, task with index {index} failed due to "
            'the following task event: "Task state is updated from RUNNING to FAILED on '
            f'{ZONE.format(region=region)}/instances/{index} {why}."',
        )

    def _take_down(self, run: BatchRun) -> None:
        run.ended.set()
        for task in list(run.tasks):
            task.end()
        for machine in list(run.machines):
            machine.until = machine.until or time.monotonic()

    def _run(self, run: BatchRun) -> None:
        group = run.job.task_groups[0]
        with self._lock:
            if not run.ended.is_set():
                self._set(run, State.SCHEDULED)
        if self.over_quota:
            self._tell(run, NO_QUOTA)
            return
        while self.hold_pending and not run.ended.wait(POLL_SECONDS):
            pass
        if run.ended.is_set():
            return
        for _ in range(group.task_count - self.out_of_stock):
            with self._lock:
                if not run.ended.is_set():
                    run.machines.append(MadeMachine(run.job.name, time.monotonic()))
                    self.bill.append(run.machines[-1])
        if self.out_of_stock:
            zone = ZONE.format(region=run.job.name.split("/")[3])
            self._tell(run, NO_MACHINES.format(zone=zone))
            return
        container = group.task_spec.runnables[0].container
        if container.image_uri not in self._images:
            self._fail(run, 0, f"Failed to pull image {container.image_uri} with exit code 125")
            self._take_down(run)
            return
        self._mount.pull()
        self._start_tasks(run)
        self._watch(run)
        self._mount.push()
        self._take_down(run)

    def _start_tasks(self, run: BatchRun) -> None:
        group = run.job.task_groups[0]
        container = group.task_spec.runnables[0].container
        image = self._images[container.image_uri]
        folder = self._folder / run.job.uid
        folder.mkdir(parents=True, exist_ok=True)
        hosts = folder / "hosts"
        hosts.write_text("".join(f"127.0.0.{n + 1}\n" for n in range(group.task_count)))
        # Machines share this one's loopback, where one port is as good as another.
        shared = {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        if group.require_hosts_file:
            shared["BATCH_HOSTS_FILE"] = str(hosts)
        for index in range(group.task_count):
            view = self._mount.view(f"batch-{run.job.uid}-{index}")
            environment = {
                **shared,
                "BATCH_TASK_INDEX": str(index),
                "BATCH_TASK_COUNT": str(group.task_count),
                **self._environment,
                **image.environment,
                **dict(group.task_spec.environment.variables),
                "GCS_MOUNT": str(view),
            }
            entry = [container.entrypoint] if container.entrypoint else image.entrypoint
            command = [*entry, *container.commands]
            with self._lock:
                if not run.ended.is_set():
                    log = folder / f"task-{index}.log"
                    run.tasks.append(RealProcess(command, image.root, environment, log))
        with self._lock:
            if not run.ended.is_set():
                self._set(run, State.RUNNING)

    def _watch(self, run: BatchRun) -> None:
        """Wait for the end of all tasks, of one that fails, or of their greatest duration."""
        seconds = run.job.task_groups[0].task_spec.max_run_duration.total_seconds()
        deadline = time.monotonic() + (seconds or float("inf"))
        while not run.ended.is_set():
            time.sleep(POLL_SECONDS)
            statuses = [task.poll() for task in run.tasks]
            failed = [index for index, status in enumerate(statuses) if status]
            if failed:
                self._fail(run, failed[0], f"with exit code {statuses[failed[0]]}")
            elif None not in statuses:
                self._end(run, State.SUCCEEDED)
            elif time.monotonic() > deadline:
                self._fail(run, 0, f"{REASONS[50005]} with exit code 50005")
            else:
                continue
            return
