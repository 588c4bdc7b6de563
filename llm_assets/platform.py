"""Where work runs, chosen once from the settings."""

from typing import Any

from dagster_pyspark import LazyPySparkResource

from llm_assets.cloud.settings import cloud_config_path
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import LocalServingPlatform
from llm_assets.endpoint.vertex import VertexServingPlatform
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.resource import LocalRegistryResource
from llm_assets.registry.vertex import VertexModelRegistryResource
from llm_assets.runners import google_cloud
from llm_assets.runners.spark import LocalSparkRunner
from llm_assets.runners.training import LocalTrainingRunner
from spark_jobs.runtime.session import local_conf


def build_resources(settings: PipelineSettings, config_path: str) -> dict[str, Any]:
    """Every resource of the graph; a `runner` of Spark or training takes precedence over
    `platform`."""
    cloud, platform = str(cloud_config_path()), settings.platform
    conf = local_conf(settings.spark.driver_memory, settings.spark.partitions, settings.spark.ui)
    # Configured at launch, with these defaults, so that the launchpad shows them for one run.
    pyspark = LazyPySparkResource.configure_at_launch(spark_config=conf)
    # All of these only hold settings; connections are opened when they are needed.
    spark_runs = settings.spark.runner or platform
    training_runs = settings.training_place
    spark = {
        "local": LocalSparkRunner(pyspark=pyspark),
        "google_cloud": google_cloud.DataprocSparkRunner(
            cloud_config_path=cloud, training=training_runs
        ),
    }
    training = {
        "local": LocalTrainingRunner(restarts=settings.training.restarts),
        "google_cloud": google_cloud.VertexTrainingRunner(cloud_config_path=cloud),
        "google_batch": google_cloud.BatchTrainingRunner(cloud_config_path=cloud),
        "tpu_vm": google_cloud.TpuVmTrainingRunner(cloud_config_path=cloud),
    }
    registry = {
        "local": LocalRegistryResource(),
        "google_cloud": VertexModelRegistryResource(cloud_config_path=cloud),
    }
    serving = {
        "local": LocalServingPlatform(),
        "google_cloud": VertexServingPlatform(cloud_config_path=cloud),
    }
    return {
        "pipeline": PipelineResource(config_path=config_path),
        "spark": spark[spark_runs],
        **({"pyspark": pyspark} if spark_runs == "local" else {}),
        "training": training[training_runs],
        "registry": registry[platform],
        "serving": serving[platform],
    }
