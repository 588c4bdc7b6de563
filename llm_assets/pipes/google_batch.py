"""Runs containers on machines of one's own, made and ended by Google Batch, with Dagster Pipes."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dagster import PipesSession

from llm_assets.pipes.failures import JobService
from llm_assets.pipes.remote_job import RemoteJobPipesClient
from llm_assets.pipes.service import (
    KEY_LABEL,
    AlreadyThere,
    Phase,
    RemoteJob,
    RemoteService,
    attempt_name,
    parse_parent,
)

if TYPE_CHECKING:
    from google.cloud.batch_v1 import BatchServiceClient, Job

CALL_SECONDS = 60.0
DELETION_SECONDS = 300.0
"""What Batch may take to end the machines of a job that is deleted."""
EXIT_CODE = re.compile(r"exit code (\d+)")
RESERVED = 50_000
"""From here on exit codes are Batch's own (page "Troubleshooting", "Task failure exit codes")."""
LOST_MACHINES = {50001, 50002, 50003, 50004, 50006}
"""Pre-empted, silent, rebooted, hanging or made again; 50005 is the greatest duration."""
PHASES = {
    "RUNNING": Phase.RUNNING,
    "SUCCEEDED": Phase.SUCCEEDED,
    "FAILED": Phase.FAILED,
    "CANCELLATION_IN_PROGRESS": Phase.CANCELLING,
    "DELETION_IN_PROGRESS": Phase.CANCELLING,
    "CANCELLED": Phase.CANCELLED,
}
FULL_PRICE = ("STANDARD", "PROVISIONING_MODEL_UNSPECIFIED")
TO_RUNNING = re.compile(r"\bto RUNNING\b")


class PipesGoogleBatchClient(RemoteJobPipesClient["BatchServiceClient"]):
    """A Pipes client for Google Batch.

    Batch makes the machines of a job and deletes them when the job has ended. A job gets a name
    that follows from what it does (`fingerprint`), so a run that finds it running or succeeded
    follows it, and one that failed is replaced. A job whose program exits with status 75 or ends
    without a word, or whose machines were taken, is started again up to `limits.restarts` times;
    the program is to continue from its last checkpoint. When the run is cancelled, for whatever
    reason, the job is deleted, which ends its machines.

    Every container receives the Pipes parameters in its environment; one process of the job, that
    of the first machine, has to open the session, as with `PipesVertexCustomJobClient`.

    Args:
        message_reader: reads the job's messages from Cloud Storage.
        client: a `google.cloud.batch_v1.BatchServiceClient`; made when first needed if absent.
        context_injector: defaults to the parameters themselves, which travel in the environment.
        forward_termination: delete the job when the run is cancelled.
        limits: polling, waiting, restarting and retrying.

    Example:
        >>> @asset
        ... def checkpoint(
        ...     context: AssetExecutionContext, machines: ResourceParam[PipesGoogleBatchClient]
        ... ):
        ...     container = {"image_uri": "my-image", "commands": ["train"]}
        ...     task = {"runnables": [{"container": container}]}
        ...     policy = {"machine_type": "g2-standard-8", "provisioning_model": "SPOT"}
        ...     instances = [{"policy": policy, "install_gpu_drivers": True}]
        ...     return machines.run(
        ...         context=context,
        ...         parent="projects/my-project/locations/us-central1",
        ...         fingerprint="3f2a91",
        ...         job={
        ...             "task_groups": [{"task_spec": task, "task_count": 1}],
        ...             "allocation_policy": {"instances": instances},
        ...         },
        ...     ).get_materialize_result(implicit_materialization=False)
        >>> defs = Definitions(
        ...     assets=[checkpoint],
        ...     resources={
        ...         "machines": PipesGoogleBatchClient(
        ...             message_reader=PipesGCSLiveMessageReader(bucket="my-bucket")
        ...         )
        ...     },
        ... )
    """

    def _service(self, parent: str, job: Any) -> RemoteService:
        if self._client is None:
            from google.cloud.batch_v1 import BatchServiceClient

            self._client = BatchServiceClient()
        return BatchJobs(self._client, parent, job)


class BatchJobs(RemoteService):
    """The Batch jobs of one project and region."""

    def __init__(
        self,
        client: "BatchServiceClient",
        parent: str,
        job: "Job | Mapping[str, Any] | None" = None,
    ) -> None:
        project, region = parse_parent(parent)
        self.place = JobService(
            service="Google Batch",
            api="batch.googleapis.com",
            role="roles/batch.jobsEditor",
            project=project,
            region=region,
        )
        self._client = client
        self._parent = parent
        self._job = job

    def find(self, key: str | None = None) -> list[RemoteJob]:
        request = {"parent": self._parent}
        if key:
            request["filter"] = f"labels.{KEY_LABEL}={key}"
        jobs = self._client.list_jobs(request, timeout=CALL_SECONDS)
        return [_describe(job) for job in jobs if KEY_LABEL in job.labels]

    def create(
        self, key: str, attempt: int, labels: Mapping[str, str], session: PipesSession
    ) -> RemoteJob:
        from google.api_core.exceptions import AlreadyExists

        job_id = attempt_name(key, attempt)
        request = {"parent": self._parent, "job_id": job_id, "job": self._enrich(labels, session)}
        try:
            return _describe(self._client.create_job(request, timeout=CALL_SECONDS))
        except AlreadyExists as error:
            raise AlreadyThere(self.get(f"{self._parent}/jobs/{job_id}")) from error

    def get(self, name: str) -> RemoteJob:
        from google.api_core.exceptions import NotFound

        try:
            return _describe(self._client.get_job(name=name, timeout=CALL_SECONDS))
        except NotFound:
            return RemoteJob(name, Phase.CANCELLED, "It was deleted, by another than this run.", {})

    def cancel(self, job: RemoteJob) -> None:
        """Delete the job, and return once its machines are gone."""
        from google.api_core.exceptions import NotFound

        try:
            deletion = self._client.delete_job(name=job.name, timeout=CALL_SECONDS)
            deletion.result(timeout=DELETION_SECONDS)
        except NotFound:
            return

    def console_url(self, name: str) -> str:
        return (
            f"https://console.cloud.google.com/batch/jobsDetail/regions/{self.place.region}/jobs/"
            f"{name.rsplit('/', 1)[-1]}/details?project={self.place.project}"
        )

    def log_query(self, name: str) -> str:
        job_id = name.rsplit("/", 1)[-1]
        return f'log_id("batch_task_logs") labels.task_group_name:"/jobs/{job_id}/"'

    def _enrich(self, labels: Mapping[str, str], session: PipesSession) -> "Job":
        from google.cloud.batch_v1 import Job

        job = Job(self._job)
        job.labels = {**job.labels, **labels}
        job.allocation_policy.labels = {**job.allocation_policy.labels, **labels}
        for group in job.task_groups:
            environment = group.task_spec.environment
            environment.variables = {
                **environment.variables,
                **session.get_bootstrap_env_vars(),
            }
        return job


def _describe(job: "Job") -> RemoteJob:
    phase = PHASES.get(job.status.state.name, Phase.WAITING)
    events = job.status.status_events
    told = [event.description for event in events if event.description]
    codes = [int(code) for text in told for code in EXIT_CODE.findall(text)]
    began = [event.event_time for event in events if TO_RUNNING.search(event.description)]
    lost = bool(LOST_MACHINES & {*codes})
    instances = job.allocation_policy.instances
    policy = instances[0].policy if instances else None
    return RemoteJob(
        name=job.name,
        phase=phase,
        # While it waits, the first words of a job are that it does.
        detail=told[-1] if told and (phase.ended or len(told) > 1) else "",
        labels=dict(job.labels),
        created=job.create_time.timestamp() if job.create_time else 0.0,
        exit_status=next((code for code in codes if code < RESERVED), None),
        lost_machines=phase is Phase.FAILED and lost,
        started=began[0].timestamp() if began else 0.0,
        ended=job.update_time.timestamp() if phase.ended else 0.0,
        uid=job.uid,
        machines=sum(group.task_count for group in job.task_groups),
        machine_type=policy.machine_type if policy else "",
        is_cheaper=policy is not None and policy.provisioning_model.name not in FULL_PRICE,
    )
