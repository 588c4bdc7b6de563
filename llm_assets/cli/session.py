"""The pipeline in force, as the commands use it outside Dagster."""

from dataclasses import dataclass

from llm_assets.config import PipelineSettings, config_path, load_settings
from llm_assets.endpoint.base import ServingPlatform
from llm_assets.pipeline import PipelineResource
from llm_assets.platform import build_resources
from llm_assets.registry.base import Registry


@dataclass(frozen=True)
class Session:
    """Settings, store and registry of one pipeline, and the platform that serves its champion."""

    settings: PipelineSettings
    pipeline: PipelineResource
    registry: Registry
    serving: ServingPlatform


def open_session() -> Session:
    """Open the pipeline named by `LLM_ASSETS_CONFIG`, or the default one."""
    path = config_path()
    settings = load_settings(path)
    resources = build_resources(settings, str(path))
    pipeline = resources["pipeline"]
    return Session(settings, pipeline, resources["registry"].open(pipeline), resources["serving"])
