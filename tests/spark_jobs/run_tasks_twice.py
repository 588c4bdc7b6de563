"""Copies, cleans and tokenizes text while each task is lost when it has done all of its work.

So each is done twice, as where a machine is lost whose tasks' files are in a store already. It
prints how many tasks there were that failed.

python -m tests.spark_jobs.run_tasks_twice read_spec.json clean_spec.json tokenize_spec.json
"""

import json
import sys
from pathlib import Path

from pyspark.sql import SparkSession

from spark_jobs.clean import job as clean
from spark_jobs.read import job as read
from spark_jobs.runtime.session import USAGE, local_conf, measured, prepare_environment
from spark_jobs.tokenize import job as tokenize


def session() -> SparkSession:
    """Two cores in this process, whose tasks may fail; their workers let each do so once."""
    prepare_environment()
    conf = local_conf("512m", 2) | {
        "spark.master": "local[2,4]",
        "spark.python.daemon.module": "tests.spark_jobs.forgetful_daemon",
    }
    return SparkSession.builder.config(map=conf).getOrCreate()


def main(read_spec: str, clean_spec: str, tokenize_spec: str) -> None:
    """Run the jobs, and print how many of their tasks failed."""
    spark = session()
    spark.sparkContext.setLogLevel("OFF")
    failed = 0
    for job, spec_type, path in (
        (read, read.ReadSpec, read_spec),
        (clean, clean.CleanSpec, clean_spec),
        (tokenize, tokenize.TokenizeSpec, tokenize_spec),
    ):
        spec = spec_type.model_validate_json(Path(path).read_text())
        stats = measured(job.run, spark, spec, print)  # type: ignore[type-var,arg-type]
        failed += stats[USAGE]["spark_failed_tasks"]
    print(json.dumps({"failed": failed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
