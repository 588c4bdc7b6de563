"""Where the Spark stages run."""

from abc import ABC, abstractmethod
from types import ModuleType
from typing import Any

from dagster import AssetExecutionContext, ConfigurableResource, MetadataValue
from dagster_pyspark import LazyPySparkResource
from pydantic import BaseModel

from spark_jobs.runtime.session import USAGE, end_local_session, measured, starting


class SparkRunner(ConfigurableResource, ABC):
    """Runs Spark jobs somewhere."""

    @abstractmethod
    def run(
        self, context: AssetExecutionContext, job: ModuleType, spec: BaseModel
    ) -> dict[str, Any]:
        """Run a job to its end and return its stats.

        Args:
            job: a module of `spark_jobs`, a program under `spark-submit`, too; its `run` takes a
                session, the spec and where lines go.
            spec: what the job takes; its `output` is the folder that the job writes into.
        """

    def end(self) -> None:
        """Give back what runs between jobs; the next one starts it again."""


class LocalSparkRunner(SparkRunner):
    """Runs them in this process, in one Spark session that starts when first needed."""

    pyspark: LazyPySparkResource

    def run(
        self, context: AssetExecutionContext, job: ModuleType, spec: BaseModel
    ) -> dict[str, Any]:
        # Terminating a run while Spark starts would otherwise leave a Java process behind.
        with starting():
            session = self.pyspark.spark_session
        if pages := session.sparkContext.uiWebUrl:
            context.log.info(f"Spark's stages and tasks, while this stage runs: {pages}")
            context.add_output_metadata({"spark_ui": MetadataValue.url(pages)})
        stats = measured(job.run, session, spec, context.log.info)
        context.add_output_metadata(stats.pop(USAGE))
        return stats

    def end(self) -> None:
        end_local_session()
