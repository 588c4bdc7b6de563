"""Runs Spark on Dataproc Serverless, with Dagster Pipes."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dagster import PipesClientCompletedInvocation, PipesSession

from llm_assets.pipes.failures import JobService
from llm_assets.pipes.remote_job import RemoteJobPipesClient
from llm_assets.pipes.service import (
    KEY_LABEL,
    AlreadyThere,
    Context,
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
        ...         batch={
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

    def run(  # type: ignore[override]
        self,
        *,
        context: Context,
        parent: str,
        batch: "Batch | Mapping[str, Any]",
        fingerprint: str | None = None,
        name: str | None = None,
        accept_succeeded: Callable[[], bool] = lambda: True,
        before_submit: Callable[[], None] = lambda: None,
        extras: dict[str, Any] | None = None,
    ) -> PipesClientCompletedInvocation:
        """Run a batch to its end.

        Args:
            context: of the op or asset.
            parent: `projects/<project>/locations/<region>`.
            batch: the batch, as `google.cloud.dataproc_v1.Batch` or its dict. Labels are added, and
                the Pipes arguments after its own.
            fingerprint: what the batch does, as a short string; the same one means the same work.
                Without it every run starts a batch of its own.
            name: the readable part of the batch's name; the asset's or op's name if absent.
            accept_succeeded: asked before a batch that succeeded earlier is taken as done; say
                False where its output has been deleted since.
            before_submit: called before a batch is submitted, and not where one is adopted: the
                place to remove what a failed one left behind.
            extras: handed to the program through the Pipes context.

        Raises:
            RemoteJobFailed: with what to do about it.
        """
        project, region = parse_parent(parent)
        service = DataprocBatches(self._client_for(region), parent, project, region, batch)
        return self._run_job(
            context=context,
            service=service,
            fingerprint=fingerprint,
            name=name,
            accept_succeeded=accept_succeeded,
            before_submit=before_submit,
            extras=extras,
        )

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
        project: str,
        region: str,
        batch: "Batch | Mapping[str, Any]",
    ) -> None:
        self.place = JobService(
            service="Dataproc Serverless",
            api="dataproc.googleapis.com",
            role="roles/dataproc.editor",
            project=project,
            region=region,
        )
        self._client = client
        self._parent = parent
        self._batch = batch

    def find(self, key: str) -> list[RemoteJob]:
        request = {"parent": self._parent, "filter": f'labels.{KEY_LABEL} = "{key}"'}
        return [_describe(b) for b in self._client.list_batches(request, timeout=CALL_SECONDS)]

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

        batch = Batch(self._batch)
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
