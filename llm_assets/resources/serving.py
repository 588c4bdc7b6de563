"""Where the champion answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from dagster import ConfigurableResource

from artifacts.store import Store
from llm_assets.config import PipelineSettings
from llm_assets.registry.base import ModelVersion
from serving import process
from serving.process import Endpoint
from serving.state import Status


class ServingPlatform(ConfigurableResource, ABC):
    """Moves an endpoint to a model version."""

    @abstractmethod
    def serve(
        self, settings: PipelineSettings, version: ModelVersion, report: Callable[[str], None]
    ) -> Endpoint:
        """Have a version served, and return once it is; a version that is served stays as it is."""


class LocalServingPlatform(ServingPlatform):
    """A server on this machine, which stays up after the run."""

    def serve(
        self, settings: PipelineSettings, version: ModelVersion, report: Callable[[str], None]
    ) -> Endpoint:
        return process.start(
            model_folder=Path(version.model_url),
            version=str(version.version),
            fingerprint=version.model_fingerprint,
            state_folder=endpoint_folder(settings),
            settings=settings.endpoint,
            report=report,
        )


def endpoint_folder(settings: PipelineSettings) -> Path:
    """Where the local endpoint keeps its state and its log."""
    store = Store(settings.store)
    return store.local_path(store.root) / "endpoint" / settings.name


def endpoint_status(settings: PipelineSettings) -> Status | None:
    """What the local endpoint is doing, or None where none runs."""
    return process.status(endpoint_folder(settings))


def stop_endpoint(settings: PipelineSettings) -> bool:
    """End the local endpoint; returns whether one was running."""
    return process.stop(endpoint_folder(settings))
