"""The smallest batch: what a Spark image and its account can do, as `check --smoke` asks."""

import platform
import sys
from typing import Any

from pyspark.sql import SparkSession

from artifacts.program.entry import PROBE, SmokeSpec, run_program
from artifacts.progress import Report
from artifacts.storage import files
from spark_jobs.runtime.session import session

ROWS = 1_000


def run(spark: SparkSession, spec: SmokeSpec, report: Report) -> dict[str, Any]:
    """Try what the stages need of a Spark image, and return what worked.

    Besides the versions and a file that is written and read back, these are `mapInArrow`, which
    needs more of the image than tasks in Python do, and a join whose two sides are shuffled.
    """
    report(f"Spark {spark.version} runs")
    executors = spark.sparkContext.parallelize([0], 1)
    numbers = spark.range(ROWS)
    mapped = numbers.mapInArrow(lambda batches: batches, "id long")
    path = f"{spec.output}/spark"
    files.write(path, PROBE)
    return {
        "python": platform.python_version(),
        "executor_python": executors.map(lambda _: platform.python_version()).collect()[0],
        "pyspark": spark.version,
        "bucket": files.read(path) == PROBE,
        # Without the hint, Spark would broadcast so small a table instead of shuffling it.
        "joined": mapped.join(numbers.hint("merge"), "id").count() == ROWS,
    }


if __name__ == "__main__":
    sys.exit(run_program(SmokeSpec, lambda spec, report: run(session(), spec, report)))
