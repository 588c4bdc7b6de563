"""Copies, cleans and tokenizes text on two executors, and kills one in each step.

The executors are processes of their own. It prints where one was killed, each time the step and
whether that was the last of its stages; and how many tasks were done again, since what they had
made was lost.

python -m tests.spark_jobs.lose_executors read_spec.json clean_spec.json tokenize_spec.json
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
from spark_jobs.read import job as read
from spark_jobs.runtime.session import local_conf, prepare_environment
from spark_jobs.tokenize import job as tokenize

Where = tuple[str, bool]
"""The label of a step, and whether its last stage runs."""


def session() -> SparkSession:
    """Two executors of one core each beside the driver; a lost one is started again."""
    prepare_environment()
    conf = local_conf("512m", 2) | {
        "spark.master": "local-cluster[2,1,1024]",
        "spark.executor.memory": "512m",
        "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.deploy.maxExecutorRetries": "-1",
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


def running(spark: SparkSession) -> set[Where]:
    """What runs, by what the work of its jobs is called (`spark_jobs.runtime.tasks.progress`)."""
    tracker = spark.sparkContext.statusTracker()
    store = spark.sparkContext._jsc.sc().statusStore()
    active = set(tracker.getActiveStageIds())
    found = set()
    for number in tracker.getActiveJobsIds():
        job, group = tracker.getJobInfo(number), store.job(number).jobGroup()
        if job and group.isDefined():
            label = group.get().rpartition("-")[0]
            found |= {(label, stage == max(job.stageIds)) for stage in active & set(job.stageIds)}
    return found


def kill_executors(spark: SparkSession, killed: list[Where]) -> None:
    """Kill the oldest executor at most twice in each step, the second time in its last stage."""
    while True:
        for where in running(spark).difference(killed):
            if found := executors():
                with suppress(psutil.NoSuchProcess):
                    found[0].kill()
                    killed.append(where)
        # A step of so small a corpus takes some tenths of a second; Java is asked at each look.
        time.sleep(0.05)


def tasks_done_again(spark: SparkSession) -> int:
    """Tasks of stages that had been done once (their first attempt is numbered 0)."""
    no_quantiles = SparkContext._gateway.new_array(SparkContext._jvm.double, 0)
    store = spark.sparkContext._jsc.sc().statusStore()
    stages = store.stageList(None, False, False, no_quantiles, None)
    found = [stages.apply(place) for place in range(stages.size())]
    return sum(stage.numCompleteTasks() for stage in found if stage.attemptId() > 0)


def main(read_spec: str, clean_spec: str, tokenize_spec: str) -> None:
    """Run the jobs, and print where executors were killed."""
    spark = session()
    # A first job, since executors register in their own time.
    spark.sparkContext.parallelize(range(4), 4).count()
    while len(executors()) < 2:
        time.sleep(0.1)
    killed: list[Where] = []
    threading.Thread(target=kill_executors, args=(spark, killed), daemon=True).start()
    read.run(spark, read.ReadSpec.model_validate_json(Path(read_spec).read_text()))
    clean.run(spark, clean.CleanSpec.model_validate_json(Path(clean_spec).read_text()))
    tokenize.run(spark, tokenize.TokenizeSpec.model_validate_json(Path(tokenize_spec).read_text()))
    print(json.dumps({"killed": killed, "again": tasks_done_again(spark)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
