"""Serving on Google Cloud."""

from collections.abc import Callable

from artifacts.errors import UserError
from llm_assets.config import PipelineSettings
from llm_assets.registry.base import ModelVersion
from llm_assets.resources.serving import ServingPlatform
from serving.process import Endpoint


class VertexServingPlatform(ServingPlatform):
    """Holds the place of Vertex AI endpoints."""

    def serve(
        self, settings: PipelineSettings, version: ModelVersion, report: Callable[[str], None]
    ) -> Endpoint:
        raise UserError(
            f"Version {version.version} is registered ({version.model_url}), but this project does "
            "not deploy to Vertex AI endpoints yet. Materialize up to `model_version`, and serve "
            "the model from that folder."
        )
