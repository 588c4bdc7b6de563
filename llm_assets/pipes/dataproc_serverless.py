"""Runs Spark on Dataproc Serverless, with Dagster Pipes."""

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
    as_dns_labels,
    attempt_name,
    parse_parent,
)

if TYPE_CHECKING:
    from google.cloud.dataproc_v1 import Batch, BatchControllerClient

CALL_SECONDS = 60.0
WORK_WITH_ARGUMENTS = ("pyspark_batch", "spark_batch", "spark_r_batch")
PHASES = {
    "PENDING": Phase.WAITING,
    "RUNNING": Phase.RUNNING,
    "CANCELLING": Phase.CANCELLING,
    "CANCELLED": Phase.CANCELLED,
    "SUCCEEDED": Phase.SUCCEEDED,
    "FAILED": Phase.FAILED,
}


class PipesDataprocServerlessClient(RemoteJobPipesClient["BatchControllerClient"]):
    """A Pipes client for Dataproc Serverless batches.

    A batch gets a name that follows from what it does (`fingerprint`). So a run that finds it
    running or succeeded follows it instead of starting a second one, and one that failed is
    replaced. When the run is cancelled, for whatever reason, so is the batch.

    The program receives its Pipes parameters as arguments, and has to open its session so:

        with open_dagster_pipes(
            params_loader=PipesCliArgsParamsLoader(),
            message_writer=PipesGCSMessageWriter(storage.Client(), interval=1),
        ) as pipes: ...

    Args:
        message_reader: reads the batch's messages from Cloud Storage.
        client: a `google.cloud.dataproc_v1.BatchControllerClient` for the batches' region; made
            when first needed if absent.
        context_injector: defaults to the parameters themselves, which travel as arguments.
        forward_termination: cancel the batch when the run is cancelled.
        limits: polling, waiting and retrying.

    Example:
        >>> @asset
        ... def clean_text(
        ...     context: AssetExecutionContext,
        ...     dataproc: ResourceParam[PipesDataprocServerlessClient],
        ... ):
        ...     return dataproc.run(
        ...         context=context,
        ...         parent="projects/my-project/locations/us-central1",
        ...         fingerprint="3f2a91",
        ...         job={
        ...             "pyspark_batch": {"main_python_file_uri": "gs://my-bucket/clean.py"},
        ...             "runtime_config": {"version": "2.3"},
        ...             "environment_config": {"execution_config": {"ttl": {"seconds": 7200}}},
        ...         },
        ...     ).get_materialize_result(implicit_materialization=False)
        >>> defs = Definitions(
        ...     assets=[clean_text],
        ...     resources={
        ...         "dataproc": PipesDataprocServerlessClient(
        ...             message_reader=PipesGCSLiveMessageReader(bucket="my-bucket")
        ...         )
        ...     },
        ... )
    """

    def _service(self, parent: str, job: Any) -> RemoteService:
        return DataprocBatches(self._client_for(parse_parent(parent)[1]), parent, job)

    def _client_for(self, region: str) -> "BatchControllerClient":
        if self._client is None:
            from google.cloud.dataproc_v1 import BatchControllerClient

            endpoint = f"{region}-dataproc.googleapis.com:443"
            self._client = BatchControllerClient(client_options={"api_endpoint": endpoint})
        return self._client


class DataprocBatches(RemoteService):
    """The batches of one project and region."""

    def __init__(
        self,
        client: "BatchControllerClient",
        parent: str,
        job: "Batch | Mapping[str, Any] | None" = None,
    ) -> None:
        project, region = parse_parent(parent)
        self.place = JobService(
            service="Dataproc Serverless (Managed Service for Apache Spark)",
            api="dataproc.googleapis.com",
            role="roles/dataproc.editor",
            project=project,
            region=region,
        )
        self._client = client
        self._parent = parent
        self._job = job

    def find(self, key: str | None = None) -> list[RemoteJob]:
        request = {"parent": self._parent}
        if key:
            request["filter"] = f'labels.{KEY_LABEL} = "{key}"'
        batches = self._client.list_batches(request, timeout=CALL_SECONDS)
        return [_describe(batch) for batch in batches if KEY_LABEL in batch.labels]

    def create(
        self, key: str, attempt: int, labels: Mapping[str, str], session: PipesSession
    ) -> RemoteJob:
        from google.api_core.exceptions import AlreadyExists

        batch_id = attempt_name(key, attempt)
        name = f"{self._parent}/batches/{batch_id}"
        batch = self._enrich(labels, session)
        request = {"parent": self._parent, "batch": batch, "batch_id": batch_id}
        try:
            self._client.create_batch(request, timeout=CALL_SECONDS)
        except AlreadyExists as error:
            raise AlreadyThere(self.get(name)) from error
        return self.get(name)

    def get(self, name: str) -> RemoteJob:
        return _describe(self._client.get_batch(name=name, timeout=CALL_SECONDS))

    def cancel(self, job: RemoteJob) -> None:
        batch = self._client.get_batch(name=job.name, timeout=CALL_SECONDS)
        if not _describe(batch).phase.ended:
            self._client.cancel_operation({"name": batch.operation}, timeout=CALL_SECONDS)

    def console_url(self, name: str) -> str:
        batch_id = name.rsplit("/", 1)[-1]
        return (
            f"https://console.cloud.google.com/dataproc/batches/{self.place.region}/{batch_id}"
            f"?project={self.place.project}"
        )

    def log_query(self, name: str) -> str:
        batch_id = name.rsplit("/", 1)[-1]
        return f'resource.type="cloud_dataproc_batch" resource.labels.batch_id="{batch_id}"'

    def _enrich(self, labels: Mapping[str, str], session: PipesSession) -> "Batch":
        from google.cloud.dataproc_v1 import Batch

        batch = Batch(self._job)
        batch.labels = {**batch.labels, **as_dns_labels(labels)}
        arguments = [
            part for pair in session.get_bootstrap_cli_arguments().items() for part in pair
        ]
        for field in WORK_WITH_ARGUMENTS:
            if field in batch:
                work = getattr(batch, field)
                work.args = [*work.args, *arguments]
        return batch


def _describe(batch: "Batch") -> RemoteJob:
    phase = PHASES.get(batch.state.name, Phase.WAITING)
    created = batch.create_time.timestamp() if batch.create_time else 0.0
    changed = batch.state_time.timestamp() if batch.state_time else 0.0
    return RemoteJob(
        name=batch.name,
        phase=phase,
        detail=batch.state_message,
        labels=dict(batch.labels),
        created=created,
        # Its machines' start and what they add are in `billed_hours` once it has ended.
        started=0.0 if phase is Phase.WAITING else created,
        ended=changed if phase.ended else 0.0,
        billed_hours=batch.runtime_info.approximate_usage.milli_dcu_seconds / 3_600_000,
    )
