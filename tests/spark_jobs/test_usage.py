"""What a job took of Spark."""

from pyspark.sql import SparkSession

from spark_jobs.runtime.session import USAGE, measured


def run(spark: SparkSession, spec: int, report: object) -> dict[str, int]:
    pairs = spark.sparkContext.parallelize(range(4), 4).map(lambda number: (number % 2, number))
    pairs.groupByKey().collect()
    return {"spec": spec}


def test_a_jobs_own_stages_count_alone(spark: SparkSession) -> None:
    first, second = (measured(run, spark, spec, lambda line: None) for spec in (1, 2))
    assert (first["spec"], second["spec"]) == (1, 2)
    assert first[USAGE]["spark_task_seconds"] > 0
    shuffled = [found[USAGE]["spark_shuffled_bytes"] for found in (first, second)]
    assert shuffled[0] == shuffled[1] > 0
    assert first[USAGE]["spark_failed_tasks"] == 0
    nothing = measured(lambda spark, spec, report: {}, spark, None, lambda line: None)[USAGE]
    assert nothing["spark_task_seconds"] == 0
