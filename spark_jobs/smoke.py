"""The smallest batch: what a Spark image and its account can do, as `check --smoke` asks."""

import platform
import sys
from typing import Any

from pyspark.sql import SparkSession

from artifacts.program.entry import PROBE, SmokeSpec, run_program
from artifacts.progress import Report
from artifacts.storage import files
from spark_jobs.runtime.session import session


def run(spark: SparkSession, spec: SmokeSpec, report: Report) -> dict[str, Any]:
    """Versions of driver and executor, and whether what is written can be read again."""
    report(f"Spark {spark.version} runs")
    executors = spark.sparkContext.parallelize([0], 1)
    path = f"{spec.output}/spark"
    files.write(path, PROBE)
    return {
        "python": platform.python_version(),
        "executor_python": executors.map(lambda _: platform.python_version()).collect()[0],
        "pyspark": spark.version,
        "bucket": files.read(path) == PROBE,
    }


if __name__ == "__main__":
    sys.exit(run_program(SmokeSpec, lambda spec, report: run(session(), spec, report)))
