"""Runs containers on machines that Google Batch creates and deletes, with Dagster Pipes."""

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from dagster import PipesSession

from llm_assets.pipes import service
from llm_assets.pipes.failures import JobService
from llm_assets.pipes.remote_job import RemoteJobPipesClient

DELETION_SECONDS = 300.0
"""What Batch may take to end the machines of a job that is deleted."""
EXIT_CODE = re.compile(r"exit code (\d+)")
RESERVED = 50_000
"""From here on exit codes are Batch's own (page "Troubleshooting", "Task failure exit codes")."""
LOST_MACHINES = {50001, 50002, 50003, 50004, 50006}
"""Preempted, not reporting, rebooted, unresponsive or recreated; 50005 is the longest duration."""
PHASES = {
    "RUNNING": service.Phase.RUNNING,
    "SUCCEEDED": service.Phase.SUCCEEDED,
    "FAILED": service.Phase.FAILED,
    "CANCELLATION_IN_PROGRESS": service.Phase.CANCELLING,
    "DELETION_IN_PROGRESS": service.Phase.CANCELLING,
    "CANCELLED": service.Phase.CANCELLED,
}
FULL_PRICE = ("STANDARD", "PROVISIONING_MODEL_UNSPECIFIED")
TO_SCHEDULED = re.compile(r"\bto SCHEDULED\b")
TO_RUNNING = re.compile(r"\bto RUNNING\b")
BOOT_SECONDS = 600.0
"""Longest time between a machine's creation and its task: it boots and gets its drivers."""


class BatchJobs(service.RemoteService):
    """The Batch jobs (`batch_v1.Job`) of one project and region."""

    kind = JobService(
        "Google Batch",
        "batch.googleapis.com",
        "roles/batch.jobsEditor",
        addresses="Its machines have no external addresses where the job names a subnetwork "
        "(`subnetwork`) with private access to Google's APIs.",
        flex_start=True,
    )
    generated = "google.cloud.batch_v1", "BatchServiceClient"
    address = "batch.googleapis.com"
    collection = "jobs"
    key_filter = "labels.{label}={key}"
    page = "batch/jobsDetail/regions/{region}/jobs/{job}/details"
    log_filter = 'log_id("batch_task_logs") labels.task_group_name:"/jobs/{job}/"'

    def list_all(self, request: Mapping[str, str]) -> Iterable[Any]:
        return self._client.list_jobs(request, timeout=service.CALL_SECONDS)

    def submit(
        self, short: str, labels: Mapping[str, str], session: PipesSession
    ) -> service.RemoteJob:
        request = {"parent": self._parent, "job_id": short, "job": self._enrich(labels, session)}
        return self.describe(self._client.create_job(request, timeout=service.CALL_SECONDS))

    def look_up(self, name: str) -> Any:
        return self._client.get_job(name=name, timeout=service.CALL_SECONDS)

    def cancel(self, job: service.RemoteJob) -> None:
        """Delete the job, and return once its machines are gone."""
        ask = partial(self._client.delete_job, name=job.name, timeout=service.CALL_SECONDS)
        service.delete(ask, DELETION_SECONDS)

    def _enrich(self, labels: Mapping[str, str], session: PipesSession) -> Any:
        job = self.type_named("Job")(self._job)
        job.labels = {**job.labels, **labels}
        # A job's own labels stop at its log entries; the policy's are given to its machines and
        # disks.
        job.allocation_policy.labels = {**job.allocation_policy.labels, **labels}
        for group in job.task_groups:
            environment = group.task_spec.environment
            environment.variables = {
                **environment.variables,
                **session.get_bootstrap_env_vars(),
            }
        return job

    def describe(self, job: Any) -> service.RemoteJob:
        phase = PHASES.get(job.status.state.name, service.Phase.WAITING)
        events = job.status.status_events
        descriptions = [event.description for event in events if event.description]
        # The events of a job have exit codes in words alone; only those of its tasks have a field.
        codes = [int(code) for text in descriptions for code in EXIT_CODE.findall(text)]
        lost = bool(LOST_MACHINES & {*codes})
        instances = job.allocation_policy.instances
        policy = instances[0].policy if instances else None
        return service.RemoteJob(
            name=job.name,
            phase=phase,
            # The first event of a waiting job only says that it waits.
            detail=descriptions[-1]
            if descriptions and (phase.ended or len(descriptions) > 1)
            else "",
            labels=dict(job.labels),
            created=service.seconds(job.create_time),
            exit_status=next((code for code in codes if code < RESERVED), None),
            lost_machines=phase is service.Phase.FAILED and lost,
            started=_began(job),
            # A job of Batch has no field for its end; this is when it was last changed.
            ended=job.update_time.timestamp() if phase.ended else 0.0,
            uid=job.uid,
            machines=sum(group.task_count for group in job.task_groups),
            machine_type=policy.machine_type if policy else "",
            is_cheaper=policy is not None and policy.provisioning_model.name not in FULL_PRICE,
        )


def _began(job: Any) -> float:
    """When the first machine was created, or a little before; 0 if none needs to exist yet.

    Batch does not report its machines. Of several, some may wait for the others, unless all are
    provided at once (flex-start); a single one exists only shortly before it runs.
    """
    first_seen = dict[str, float]()
    for event in job.status.status_events:
        for pattern in (TO_SCHEDULED, TO_RUNNING):
            if pattern.search(event.description):
                first_seen.setdefault(pattern.pattern, event.event_time.timestamp())
    running = first_seen.get(TO_RUNNING.pattern, 0.0)
    scheduled = first_seen.get(TO_SCHEDULED.pattern, running)
    policies = [instance.policy for instance in job.allocation_policy.instances]
    at_once = any(policy.provisioning_model.name == "FLEX_START" for policy in policies)
    if sum(group.task_count for group in job.task_groups) > 1 and not at_once:
        return scheduled
    return running and max(scheduled, running - BOOT_SECONDS)


class PipesGoogleBatchClient(RemoteJobPipesClient):
    """A `RemoteJobPipesClient` for Google Batch, which makes a job's machines and deletes them.

    A cancelled job is deleted, which ends its machines.

    Example:
        >>> task = {"runnables": [{"container": {"image_uri": "my-image", "commands": ["train"]}}]}
        >>> policy = {"machine_type": "g2-standard-8", "provisioning_model": "SPOT"}
        >>> instances = [{"policy": policy, "install_gpu_drivers": True}]
        >>> job = {
        ...     "task_groups": [{"task_spec": task, "task_count": 1}],
        ...     "allocation_policy": {"instances": instances},
        ... }
    """

    jobs = BatchJobs
