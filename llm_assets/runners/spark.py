"""Where the Spark stages run."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from dagster import AssetExecutionContext, ConfigurableResource
from dagster_pyspark import LazyPySparkResource
from pyspark.sql import SparkSession

from artifacts.progress import Report
from spark_jobs.clean import job as clean
from spark_jobs.read import job as read
from spark_jobs.runtime.session import end_local_session, prepare_environment
from spark_jobs.runtime.usage import USAGE, Spec, measured
from spark_jobs.tokenize import job as tokenize


class SparkRunner(ConfigurableResource, ABC):
    """Runs the Spark jobs somewhere."""

    @abstractmethod
    def read(self, context: AssetExecutionContext, spec: read.ReadSpec) -> dict[str, Any]:
        """Run `spark_jobs.read.job` and return its stats."""

    @abstractmethod
    def clean(self, context: AssetExecutionContext, spec: clean.CleanSpec) -> dict[str, Any]:
        """Run `spark_jobs.clean.job` and return its stats."""

    @abstractmethod
    def tokenize(
        self, context: AssetExecutionContext, spec: tokenize.TokenizeSpec
    ) -> dict[str, Any]:
        """Run `spark_jobs.tokenize.job` and return its stats."""


class LocalSparkRunner(SparkRunner):
    """Runs them in this process, in one Spark session that starts when first needed."""

    pyspark: LazyPySparkResource

    def read(self, context: AssetExecutionContext, spec: read.ReadSpec) -> dict[str, Any]:
        return self._run(context, read.run, spec)

    def clean(self, context: AssetExecutionContext, spec: clean.CleanSpec) -> dict[str, Any]:
        return self._run(context, clean.run, spec)

    def tokenize(
        self, context: AssetExecutionContext, spec: tokenize.TokenizeSpec
    ) -> dict[str, Any]:
        found = self._run(context, tokenize.run, spec)
        # The last Spark stage: what follows, training above all, needs the memory.
        end_local_session()
        return found

    def _run(
        self,
        context: AssetExecutionContext,
        job: Callable[[SparkSession, Spec, Report], dict[str, Any]],
        spec: Spec,
    ) -> dict[str, Any]:
        prepare_environment()
        session = self.pyspark.spark_session
        if pages := session.sparkContext.uiWebUrl:
            context.log.info(f"Spark's stages and tasks, while this stage runs: {pages}")
        found = measured(job, session, spec, context.log.info)
        context.add_output_metadata(found.pop(USAGE))
        return found
