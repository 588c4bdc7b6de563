"""Where the champion answers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

from dagster import ConfigurableResource
from pydantic import BaseModel, ConfigDict

from artifacts.store.store import Store, layout
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.endpoint.judged import judged_documents
from llm_assets.registry.records import ModelVersion
from serving import endpoint as process

NOT_COMPARED = "not compared: the store has no evaluation of it on plain text"


class Served(BaseModel):
    """An endpoint that answers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    predict_url: str
    """Where `{"instances": [...]}` is answered."""
    authorization: str = ""
    """The header that a request needs, as a shell line has it; empty where none is needed."""
    changed: bool
    """Whether this call changed what is served."""
    reason: str
    """In words: already serving, or serving now."""
    engine: str = ""
    """Which one computes, and why that one, as far as is known."""
    compared: str = ""
    """Its bits beside the evaluation's, in words."""
    instead_of: int | None = None
    """The version that is wanted and cannot be served, where another serves in its place."""


class ServingPlatform(ConfigurableResource, ABC):
    """Moves an endpoint to a model version."""

    @abstractmethod
    def serve(
        self, settings: PipelineSettings, version: ModelVersion, report: Callable[[str], None]
    ) -> Served:
        """Have a version served, and return once it is; a version that is served stays as it is.

        Raises:
            RolloutFailed: the version served before still is.
        """

    @abstractmethod
    def serves(self, settings: PipelineSettings) -> bool:
        """Whether any version serves now."""

    @abstractmethod
    def stop(self, settings: PipelineSettings) -> bool:
        """End the endpoint; returns whether there was one."""


class LocalServingPlatform(ServingPlatform):
    """A server on this machine, which stays up after the run."""

    def serve(
        self, settings: PipelineSettings, version: ModelVersion, report: Callable[[str], None]
    ) -> Served:
        store = Store(settings.store)
        endpoint = process.start(
            model_folder=Path(version.model_url),
            version=str(version.version),
            fingerprint=version.model_fingerprint,
            state_folder=endpoint_folder(settings),
            settings=settings.endpoint,
            report=report,
            name=settings.name,
            conversions=Path(store.machine_cache) / layout.CONVERSIONS_FOLDER,
            judged=judged_documents(store, version),
        )
        compared = str(endpoint.comparison) if endpoint.comparison else NOT_COMPARED
        return Served(
            url=endpoint.url,
            predict_url=f"{endpoint.url}/predict",
            changed=endpoint.changed,
            reason=endpoint.reason,
            engine=endpoint.engine,
            compared=compared,
        )

    def serves(self, settings: PipelineSettings) -> bool:
        found = process.status(endpoint_folder(settings))
        return found is not None and bool(found.routes)

    def stop(self, settings: PipelineSettings) -> bool:
        return process.stop(endpoint_folder(settings))
