"""Where the champion answers."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from dagster import ConfigurableResource
from pydantic import BaseModel, ConfigDict

from artifacts.errors import UserError
from artifacts.progress import Report
from artifacts.store.store import Store
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.as_served import check_engine, measure_as_served
from llm_assets.endpoint.folder import conversions_folder, endpoint_folder, model_to_serve
from llm_assets.endpoint.judged import judged_documents
from llm_assets.endpoint.live import LiveEndpoint
from llm_assets.registry.state import ModelVersion
from recipes.evaluation.spec import EvaluationSpec
from serving import endpoint as process
from serving.settings import QUANTIZED, Weights

NOT_COMPARED = "not compared: the store has no evaluation of it on plain text"
UNCHECKED = (
    "not compared, as `endpoint.engine.unchecked` accepts: its engine gives no log-probabilities "
    "of prompts"
)


class LiveAddress(BaseModel):
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
        self, settings: PipelineSettings, version: ModelVersion, report: Report
    ) -> LiveAddress:
        """Have a version served, and return once it is; a version that is served stays as it is.

        Raises:
            RolloutFailed: the version served before still is.
        """

    def quantized(self, settings: PipelineSettings) -> Weights | None:
        """The format that weights are quantized to here; None where they serve as trained."""
        return None

    def check(self, settings: PipelineSettings, model: Path, report: Report) -> None:
        """Raise UserError where models like this one could not be served, before one is trained."""

    def measure(
        self, settings: PipelineSettings, spec: EvaluationSpec, report: Report
    ) -> dict[str, Any]:
        """Add to what was evaluated how it scores as it would serve, where weights are quantized.

        Returns:
            What is new of the evaluation's result.
        """
        return {}

    def latency(self, settings: PipelineSettings, report: Report) -> float | None:
        """Seconds that a client waits for a short answer; None where that is not measured."""
        return None

    @abstractmethod
    def serves(self, settings: PipelineSettings) -> bool:
        """Whether any version serves now."""

    @abstractmethod
    def stop(self, settings: PipelineSettings) -> bool:
        """End the endpoint; returns whether there was one."""


class LocalServingPlatform(ServingPlatform):
    """A server on this machine, which stays up after the run."""

    def serve(
        self, settings: PipelineSettings, version: ModelVersion, report: Report
    ) -> LiveAddress:
        judged = judged_documents(Store(settings.store), version)
        desired = model_to_serve(settings, version).model_copy(update={"judged": judged})
        endpoint = process.start(endpoint_folder(settings), desired, report)
        comparison, url = endpoint.route.comparison, endpoint.status.url
        return LiveAddress(
            url=url,
            predict_url=f"{url}/predict",
            changed=endpoint.changed,
            reason="serving now" if endpoint.changed else "already serving",
            engine=endpoint.route.engine,
            compared=str(comparison or (UNCHECKED if desired.judged else NOT_COMPARED)),
        )

    def quantized(self, settings: PipelineSettings) -> Weights | None:
        weights = settings.endpoint.weights
        return weights if weights in QUANTIZED else None

    def check(self, settings: PipelineSettings, model: Path, report: Report) -> None:
        if (weights := self.quantized(settings)) is None:
            return
        report(f"trying whether an engine runs this model in {weights}")
        check_engine(model, settings.endpoint, conversions_folder(Store(settings.store)))

    def measure(
        self, settings: PipelineSettings, spec: EvaluationSpec, report: Report
    ) -> dict[str, Any]:
        if self.quantized(settings) is None:
            return {}
        conversions = conversions_folder(Store(settings.store))
        return measure_as_served(spec, settings.endpoint, conversions, report)

    def latency(self, settings: PipelineSettings, report: Report) -> float | None:
        running = process.status(endpoint_folder(settings))
        if running is None:
            return None
        try:
            return LiveEndpoint(running).latency()
        except UserError as error:
            report(f"the latency was not measured: {error}")
            return None

    def serves(self, settings: PipelineSettings) -> bool:
        found = process.status(endpoint_folder(settings))
        return found is not None and bool(found.routes)

    def stop(self, settings: PipelineSettings) -> bool:
        return process.stop(endpoint_folder(settings))
