"""What the local endpoint is told and where it keeps its state; no Dagster here."""

import json
from pathlib import Path

from artifacts.model import CONFIG_NAME
from artifacts.storage import files
from artifacts.store.pipelines import Pipeline
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


def why_unable(settings: PipelineSettings, record: Pipeline, version: ModelVersion) -> str:
    """Why a version cannot serve what its recipe teaches; empty for one that can.

    A classifier's base model need not know any of the classes: whoever asked it would be told a
    token, or a class of another task.
    """
    if not version.is_base or settings.checkpoint.form != "labeled":
        return ""
    try:
        config = json.loads(files.read(f"{version.model_url}/{CONFIG_NAME}"))
    except (FileNotFoundError, ValueError):
        # A model that is gone or damaged is told of where it is to serve.
        return ""
    shards = record.find_current("tokenized_shards")
    own = set((config.get("id2label") or {}).values())
    is_classifier = "ForSequenceClassification" in str(config.get("architectures"))
    if is_classifier and (shards is None or own & set(shards.stats["labels"])):
        return ""
    told = f"Version {version.version} is the base model, which knows none of the classes, so it "
    told += "does not serve. The first version that is promoted does, or one that you approve: "
    return f"{told}`llm-assets approve VERSION --reason REASON`."


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
