"""What the Pipes clients of this package have in common."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from dagster import (
    PipesClient,
    PipesClientCompletedInvocation,
    PipesContextInjector,
    PipesEnvContextInjector,
)
from dagster._core.definitions.resource_annotation import TreatAsResourceParam

from llm_assets.pipes.limits import Limits
from llm_assets.pipes.messages import PipesGCSLiveMessageReader
from llm_assets.pipes.remote_job import RemoteRun
from llm_assets.pipes.service import Context, RemoteService, key_of

ServiceClient = TypeVar("ServiceClient")


class RemoteJobPipesClient(PipesClient, TreatAsResourceParam, Generic[ServiceClient]):
    """A Pipes client whose work is one job of a remote service.

    Args:
        message_reader: reads the job's messages from Cloud Storage.
        client: the service's generated client for the jobs' region; made when first needed if
            absent.
        context_injector: defaults to the Pipes parameters themselves.
        forward_termination: cancel the job when the run is cancelled.
        limits: polling, waiting, restarting and retrying.
    """

    def __init__(
        self,
        message_reader: PipesGCSLiveMessageReader,
        client: ServiceClient | None = None,
        context_injector: PipesContextInjector | None = None,
        forward_termination: bool = True,
        limits: Limits | None = None,
    ) -> None:
        self._message_reader = message_reader
        self._client = client
        self._context_injector = context_injector or PipesEnvContextInjector()
        self._forward_termination = forward_termination
        self._limits = limits or Limits()

    def _run_job(
        self,
        *,
        context: Context,
        service: RemoteService,
        fingerprint: str | None,
        name: str | None,
        accept_succeeded: Callable[[], bool],
        before_submit: Callable[[], None],
        extras: dict[str, Any] | None,
    ) -> PipesClientCompletedInvocation:
        """From the search for an existing job to its judged end; raises RemoteJobFailed."""
        run = RemoteRun(
            context=context,
            service=service,
            reader=self._message_reader.for_run(context.log.warning),
            key=key_of(context, name, fingerprint),
            limits=self._limits,
            accept_succeeded=accept_succeeded,
            before_submit=before_submit,
            forward_termination=self._forward_termination,
        )
        return run.run(self._context_injector, extras)
