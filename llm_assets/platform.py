"""Where work runs, chosen once from the settings."""

from collections.abc import Callable
from typing import Any

from dagster_pyspark import LazyPySparkResource

from llm_assets.cloud.settings import cloud_config_path
from llm_assets.config import PipelineSettings, TrainingPlace
from llm_assets.endpoint.base import LocalServingPlatform
from llm_assets.endpoint.vertex import VertexServingPlatform
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.resource import LocalRegistryResource
from llm_assets.registry.vertex import VertexModelRegistryResource
from llm_assets.runners.google_cloud import (
    BatchTrainingRunner,
    DataprocSparkRunner,
    VertexTrainingRunner,
)
from llm_assets.runners.spark import LocalSparkRunner
from llm_assets.runners.training import LocalTrainingRunner
from spark_jobs.runtime.session import local_conf

Builder = Callable[[], Any]


def build_resources(settings: PipelineSettings, config_path: str) -> dict[str, Any]:
    """Every resource of the graph; an axis' own `runner` beats the platform."""
    cloud = str(cloud_config_path())

    def choose(
        local: Builder,
        on_cloud: Builder,
        runner: TrainingPlace | None = None,
        on_machines: Builder | None = None,
    ) -> Any:
        places = {"local": local, "google_cloud": on_cloud, "google_batch": on_machines}
        build = places[runner or settings.platform]
        assert build is not None, "the settings offer a place only where there is one"
        return build()

    spark = settings.spark
    conf = local_conf(spark.driver_memory, spark.partitions, spark.ui)
    return {
        "pipeline": PipelineResource(config_path=config_path),
        "spark": choose(
            lambda: LocalSparkRunner(pyspark=LazyPySparkResource(spark_config=conf)),
            lambda: DataprocSparkRunner(cloud_config_path=cloud),
            spark.runner,
        ),
        "training": choose(
            lambda: LocalTrainingRunner(restarts=settings.training.restarts),
            lambda: VertexTrainingRunner(cloud_config_path=cloud),
            settings.training.runner,
            lambda: BatchTrainingRunner(cloud_config_path=cloud),
        ),
        "registry": choose(
            LocalRegistryResource, lambda: VertexModelRegistryResource(cloud_config_path=cloud)
        ),
        "serving": choose(
            LocalServingPlatform, lambda: VertexServingPlatform(cloud_config_path=cloud)
        ),
    }
