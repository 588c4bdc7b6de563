"""Runs Spark on Dataproc Serverless, with Dagster Pipes."""

from collections.abc import Iterable, Mapping
from typing import Any

from dagster import PipesSession

from llm_assets.pipes import service
from llm_assets.pipes.failures import JobService
from llm_assets.pipes.remote_job import RemoteJobPipesClient

WORK_WITH_ARGUMENTS = ("pyspark_batch", "spark_batch", "spark_r_batch")
PHASES = {
    "RUNNING": service.Phase.RUNNING,
    "CANCELLING": service.Phase.CANCELLING,
    "CANCELLED": service.Phase.CANCELLED,
    "SUCCEEDED": service.Phase.SUCCEEDED,
    "FAILED": service.Phase.FAILED,
}
"""A batch in any other state waits."""


class DataprocBatches(service.RemoteService):
    """The batches (`dataproc_v1.Batch`) of one project and region."""

    kind = JobService(
        "Dataproc Serverless (Managed Service for Apache Spark)",
        "dataproc.googleapis.com",
        "roles/dataproc.editor",
        addresses="Batches need no external addresses: name a `subnetwork` with private access to "
        "Google's APIs.",
    )
    generated = "google.cloud.dataproc_v1", "BatchControllerClient"
    address = "{region}-dataproc.googleapis.com:443"
    collection = "batches"
    key_filter = 'labels.{label} = "{key}"'
    page = "dataproc/batches/{region}/{job}"
    log_filter = 'resource.type="cloud_dataproc_batch" resource.labels.batch_id="{job}"'

    def list_all(self, request: Mapping[str, str]) -> Iterable[Any]:
        return self._client.list_batches(request, timeout=service.CALL_SECONDS)

    def submit(
        self, short: str, labels: Mapping[str, str], session: PipesSession
    ) -> service.RemoteJob:
        batch = self._enrich(labels, session)
        request = {"parent": self._parent, "batch": batch, "batch_id": short}
        self._client.create_batch(request, timeout=service.CALL_SECONDS)
        # Read back at once: a batch that is not visible yet must not pass for a deleted one.
        return self.describe(self.look_up(self.full_name(short)))

    def look_up(self, name: str) -> Any:
        return self._client.get_batch(name=name, timeout=service.CALL_SECONDS)

    def cancel(self, job: service.RemoteJob) -> None:
        # Batches can only be created, read and deleted: to end one, the operation behind it is
        # canceled.
        batch = self.look_up(job.name)
        if not self.describe(batch).phase.ended:
            self._client.cancel_operation({"name": batch.operation}, timeout=service.CALL_SECONDS)

    def _enrich(self, labels: Mapping[str, str], session: PipesSession) -> Any:
        batch = self.type_named("Batch")(self._job)
        batch.labels = {**batch.labels, **service.as_dns_labels(labels)}
        arguments = [
            part for pair in session.get_bootstrap_cli_arguments().items() for part in pair
        ]
        # A batch has exactly one of these; the other kinds, SQL and notebooks, take no arguments.
        for field in WORK_WITH_ARGUMENTS:
            if field in batch:
                work = getattr(batch, field)
                work.args = [*work.args, *arguments]
        return batch

    def describe(self, job: Any) -> service.RemoteJob:
        phase = PHASES.get(job.state.name, service.Phase.WAITING)
        created = service.seconds(job.create_time)
        return service.RemoteJob(
            name=job.name,
            phase=phase,
            detail=job.state_message,
            labels=dict(job.labels),
            created=created,
            # `billed_hours` includes when its machines started and what they add, once it has
            # ended.
            started=0.0 if phase is service.Phase.WAITING else created,
            ended=service.seconds(job.state_time) if phase.ended else 0.0,
            # The name of a deleted batch can be used again.
            uid=job.uuid,
            # From milli-DCU seconds to DCU hours.
            billed_hours=job.runtime_info.approximate_usage.milli_dcu_seconds / 3_600_000,
            units=job.runtime_info.current_usage.milli_dcu / 1_000,
        )


class PipesDataprocServerlessClient(RemoteJobPipesClient):
    """A `RemoteJobPipesClient` for Dataproc Serverless batches, which are not started again.

    The program receives its Pipes parameters as arguments, and opens its session with a
    `params_loader=PipesCliArgsParamsLoader()` as well.

    Example:
        >>> job = {
        ...     "pyspark_batch": {"main_python_file_uri": "gs://my-bucket/clean.py"},
        ...     "runtime_config": {"version": "2.3"},
        ...     "environment_config": {"execution_config": {"ttl": {"seconds": 7_200}}},
        ... }
    """

    jobs = DataprocBatches
