"""What the local endpoint is told and where it keeps its state; no Dagster here."""

from pathlib import Path

from artifacts.store.store import Store, layout
from llm_assets.config import PipelineSettings
from llm_assets.registry.state import ModelVersion
from serving.state import Desired, StateFolder, Status


def endpoint_folder(settings: PipelineSettings) -> Path:
    """Where an endpoint of this machine and the board keep their state and logs."""
    return Store(settings.store).machine_root / layout.endpoint(settings.name)


def endpoint_status(settings: PipelineSettings) -> Status | None:
    """What the pipeline's endpoint on this machine is doing; None where none runs."""
    return StateFolder(endpoint_folder(settings)).running if settings.platform == "local" else None


def conversions_folder(store: Store) -> Path:
    """Where converted models are cached, which an endpoint of this machine serves."""
    return Path(store.machine_cache) / layout.CONVERSIONS_FOLDER


def model_to_serve(settings: PipelineSettings, version: ModelVersion) -> Desired:
    """A version as the local endpoint is told to serve it, without what it is compared with."""
    return Desired(
        model_folder=Path(version.model_url),
        version=str(version.version),
        fingerprint=version.model_fingerprint,
        settings=settings.endpoint,
        name=settings.name,
        conversions=conversions_folder(Store(settings.store)),
    )
