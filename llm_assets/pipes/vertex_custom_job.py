"""Runs containers on Vertex AI as custom jobs, with Dagster Pipes."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dagster import PipesSession

from llm_assets.pipes import service
from llm_assets.pipes.failures import NO_MACHINES, JobService
from llm_assets.pipes.remote_job import RemoteJobPipesClient

EXIT_STATUS = re.compile(r"non-zero status of (\d+)")
PREEMPTED = re.compile(r"pre-?empt|spot .*reclaim", re.IGNORECASE)
QUEUED = "Vertex AI keeps a job queued while the project's quota for its machines is used up"
"""Documented on Vertex AI's training page; the job itself reports no reason."""
PHASES = {
    "JOB_STATE_RUNNING": service.Phase.RUNNING,
    "JOB_STATE_UPDATING": service.Phase.RUNNING,
    "JOB_STATE_CANCELLING": service.Phase.CANCELLING,
    "JOB_STATE_CANCELLED": service.Phase.CANCELLED,
    "JOB_STATE_SUCCEEDED": service.Phase.SUCCEEDED,
    "JOB_STATE_PARTIALLY_SUCCEEDED": service.Phase.FAILED,
    "JOB_STATE_FAILED": service.Phase.FAILED,
    "JOB_STATE_EXPIRED": service.Phase.FAILED,
}
"""A job in any other state waits."""


class VertexCustomJobs(service.RemoteService):
    """The custom jobs (`aiplatform_v1.CustomJob`) of one project and region."""

    kind = JobService(
        "Vertex AI (Gemini Enterprise Agent Platform)",
        "aiplatform.googleapis.com",
        "roles/aiplatform.user",
        pulls_images="Vertex AI's service agent "
        "(service-PROJECT_NUMBER@gcp-sa-aiplatform.iam.gserviceaccount.com)",
        flex_start=True,
    )
    generated = "google.cloud.aiplatform_v1", "JobServiceClient"
    address = "{region}-aiplatform.googleapis.com"
    collection = "customJobs"
    key_filter = 'labels.{label}="{key}"'
    page = "vertex-ai/locations/{region}/training/{job}"
    log_filter = 'resource.type="ml_job" resource.labels.job_id="{job}"'

    def list_all(self, request: Mapping[str, str]) -> Iterable[Any]:
        return self._client.list_custom_jobs(request, timeout=service.CALL_SECONDS)

    def submit(
        self, short: str, labels: Mapping[str, str], session: PipesSession
    ) -> service.RemoteJob:
        request = {"parent": self._parent, "custom_job": self._enrich(short, labels, session)}
        return self.describe(self._client.create_custom_job(request, timeout=service.CALL_SECONDS))

    def look_up(self, name: str) -> Any:
        return self._client.get_custom_job(name=name, timeout=service.CALL_SECONDS)

    def cancel(self, job: service.RemoteJob) -> None:
        self._client.cancel_custom_job(name=job.name, timeout=service.CALL_SECONDS)

    def _enrich(self, short: str, labels: Mapping[str, str], session: PipesSession) -> Any:
        job = self.type_named("CustomJob")(self._job)
        # Only for people: Vertex AI gives each job an id of its own, so names may repeat, and two
        # runs that submit at once both succeed. `RemoteRun` settles which job goes on.
        job.display_name = short
        job.labels = {**job.labels, **labels}
        variables = [
            {"name": name, "value": value}
            for name, value in session.get_bootstrap_env_vars().items()
        ]
        for pool in job.job_spec.worker_pool_specs:
            # A pool has one of the two; proto-plus takes the message that is not set for false.
            for spec in (pool.container_spec, pool.python_package_spec):
                if spec:
                    spec.env = [*spec.env, *variables]
        return job

    def describe(self, job: Any) -> service.RemoteJob:
        phase = PHASES.get(job.state.name, service.Phase.WAITING)
        detail = QUEUED if job.state.name == "JOB_STATE_QUEUED" else job.error.message
        pools = job.job_spec.worker_pool_specs
        # A custom job has no field for its program's exit status; only the words of its error tell
        # it.
        status = EXIT_STATUS.search(detail) if phase is service.Phase.FAILED else None
        lost = bool(PREEMPTED.search(detail) or NO_MACHINES.search(detail))
        return service.RemoteJob(
            name=job.name,
            phase=phase,
            detail=detail,
            labels=dict(job.labels),
            created=service.seconds(job.create_time),
            exit_status=int(status[1]) if status else None,
            lost_machines=phase is service.Phase.FAILED and lost,
            started=service.seconds(job.start_time),
            ended=service.seconds(job.end_time),
            machines=sum(pool.replica_count for pool in pools),
            machine_type=pools[0].machine_spec.machine_type if pools else "",
            is_cheaper=job.job_spec.scheduling.strategy.name in ("SPOT", "FLEX_START"),
        )


class PipesVertexCustomJobClient(RemoteJobPipesClient):
    """A `RemoteJobPipesClient` for Vertex AI custom jobs.

    Example:
        >>> pool = {
        ...     "replica_count": 1,
        ...     "machine_spec": {
        ...         "machine_type": "a2-highgpu-1g",
        ...         "accelerator_type": "NVIDIA_TESLA_A100",
        ...         "accelerator_count": 1,
        ...     },
        ...     "container_spec": {"image_uri": "my-image", "args": ["train"]},
        ... }
        >>> scheduling = {"strategy": "SPOT", "timeout": {"seconds": 86_400}}
        >>> job = {"job_spec": {"worker_pool_specs": [pool], "scheduling": scheduling}}
    """

    jobs = VertexCustomJobs
