"""Where work runs, chosen once from the settings."""

from typing import Any

from dagster_pyspark import LazyPySparkResource

from artifacts.errors import UserError
from llm_assets.cloud.config import cloud_config_path
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import LocalServingPlatform
from llm_assets.endpoint.vertex import VertexServingPlatform
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.resource import LocalRegistryResource
from llm_assets.registry.vertex import VertexModelRegistryResource
from llm_assets.runners.google_cloud import DataprocSparkRunner, VertexTrainingRunner
from llm_assets.runners.spark import LocalSparkRunner
from llm_assets.runners.training import LocalTrainingRunner
from spark_jobs.runtime.session import local_conf


def build_resources(settings: PipelineSettings, config_path: str) -> dict[str, Any]:
    """Every resource of the graph; an axis' own `runner` beats the platform.

    Raises:
        UserError: an axis asks for a platform that it does not have.
    """
    cloud = str(cloud_config_path())
    return {
        "pipeline": PipelineResource(config_path=config_path),
        "spark": _choose(
            "spark",
            settings.spark.runner or settings.platform,
            {
                "local": lambda: LocalSparkRunner(
                    pyspark=LazyPySparkResource(
                        spark_config=local_conf(
                            settings.spark.driver_memory,
                            settings.spark.partitions,
                            settings.spark.ui,
                        )
                    )
                ),
                "google_cloud": lambda: DataprocSparkRunner(cloud_config_path=cloud),
            },
        ),
        "training": _choose(
            "training",
            settings.training.runner or settings.platform,
            {
                "local": lambda: LocalTrainingRunner(restarts=settings.training.restarts),
                "google_cloud": lambda: VertexTrainingRunner(cloud_config_path=cloud),
            },
        ),
        "registry": _choose(
            "registry",
            settings.platform,
            {
                "local": LocalRegistryResource,
                "google_cloud": lambda: VertexModelRegistryResource(cloud_config_path=cloud),
            },
        ),
        "serving": _choose(
            "serving",
            settings.platform,
            {
                "local": LocalServingPlatform,
                "google_cloud": lambda: VertexServingPlatform(cloud_config_path=cloud),
            },
        ),
    }


def _choose(axis: str, platform: str, builders: dict[str, Any]) -> Any:
    if platform not in builders:
        raise UserError(
            f"{axis}: there is no runner for `{platform}`; available: {', '.join(builders)}. "
            f"Set `platform` or `{axis}.runner`."
        )
    return builders[platform]()
