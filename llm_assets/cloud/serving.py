"""Serving on Google Cloud."""

from dagster import AssetExecutionContext

from artifacts.errors import UserError
from llm_assets.config import PipelineSettings
from llm_assets.registry.base import ModelVersion
from llm_assets.resources.serving import ServingPlatform
from serving.process import Endpoint


class VertexServingPlatform(ServingPlatform):
    """Holds the place of Vertex AI endpoints."""

    def serve(
        self, context: AssetExecutionContext, settings: PipelineSettings, version: ModelVersion
    ) -> Endpoint:
        raise UserError(
            f"Version {version.version} is registered ({version.model_url}), but this project does "
            "not deploy to Vertex AI endpoints yet. Materialize up to `model_version`, and serve "
            "the model from that folder."
        )
