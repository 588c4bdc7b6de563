"""Cleans a corpus on two executors, processes of their own, and kills one at several points.

python -m tests.spark_jobs.lose_executors raw_corpus output
"""

import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
from pyspark import SparkContext
from pyspark.sql import SparkSession

from spark_jobs.clean import job as clean
from spark_jobs.runtime.session import local_conf, prepare_environment
from spark_jobs.settings import CleanCorpusSettings

AFTER_STEPS = (1, 4, 8)
"""An executor is killed when so many steps are done and the next one is running."""


def session() -> SparkSession:
    """Two executors of one core each beside the driver; a lost one is started again."""
    prepare_environment()
    conf = local_conf("512m", 2) | {
        "spark.master": "local-cluster[2,1,1024]",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    }
    return SparkSession.builder.config(map=conf).getOrCreate()


def executors() -> list[psutil.Process]:
    """The executors of this process's session, oldest first."""
    found = []
    for process in psutil.Process(SparkContext._gateway.proc.pid).children(recursive=True):
        # What ends while it is looked at is none.
        with suppress(psutil.NoSuchProcess):
            if "CoarseGrainedExecutorBackend" in " ".join(process.cmdline()):
                found.append(process)
    return sorted(found, key=psutil.Process.create_time)


def kill_executors(spark: SparkSession, output: str, killed: list[int]) -> None:
    """Kill the oldest executor each time that the next of `AFTER_STEPS` is reached."""
    for wanted in AFTER_STEPS:
        while len(list(Path(f"{output}.scratch").glob("steps/*/_SUCCESS"))) < wanted:
            time.sleep(0.05)
        while not spark.sparkContext.statusTracker().getActiveStageIds():
            time.sleep(0.01)
        process = executors()[0]
        process.kill()
        killed.append(process.pid)


def main(raw: str, output: str) -> None:
    """Clean, and print how many executors there were and which were killed."""
    spark = session()
    # A first job, since executors register in their own time.
    spark.sparkContext.parallelize(range(4), 4).count()
    while len(executors()) < 2:
        time.sleep(0.1)
    killed: list[int] = []
    threading.Thread(target=kill_executors, args=(spark, output, killed), daemon=True).start()
    spec = clean.CleanSpec(
        raw_corpus=raw,
        output=output,
        settings=CleanCorpusSettings(minimum_characters=40),
        documents_in_memory=0,
    )
    clean.run(spark, spec, lambda line: None)
    print(json.dumps({"killed": killed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
