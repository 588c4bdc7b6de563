"""What a job took of Spark: task time, spills, shuffles, and where one task held up the others.

Read from the driver's own status store, which Spark's pages and its event log show too: it is there
without either, on a laptop as on Dataproc.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, TypeVar

from py4j.java_gateway import JavaObject
from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession

from artifacts.progress import Report

Spec = TypeVar("Spec")

USAGE = "spark"
"""Key under which `measured` adds the usage to what a job returns."""
_SKEWED_SECONDS = 1.0
"""Least by which a stage's slowest task is longer than its middle one."""


@dataclass(frozen=True)
class Usage:
    """What some stages took."""

    spark_task_seconds: float
    """Of all tasks together."""
    spark_spilled_bytes: int
    """Written to disk for want of memory, compressed."""
    spark_shuffled_bytes: int
    """Written for other tasks."""
    spark_failed_tasks: int
    """Each was run again, or the job failed."""
    spark_skew: str
    """The stage that waited longest for one task, in words."""


class StageTimes(NamedTuple):
    """How long the tasks of a stage ran, in seconds."""

    label: str
    """What its work is called."""
    tasks: int
    middle: float
    slowest: float


def measured(
    run: Callable[[SparkSession, Spec, Report], dict[str, Any]],
    spark: SparkSession,
    spec: Spec,
    report: Report,
) -> dict[str, Any]:
    """What a job returns, and under `USAGE` the fields of `Usage` for the stages that it ran."""
    before = max((stage.stageId() for stage in _stages(spark)), default=-1)
    stats = run(spark, spec, report)
    return stats | {USAGE: asdict(_usage(spark, before))}


def _usage(spark: SparkSession, before: int) -> Usage:
    stages = [stage for stage in _stages(spark) if stage.stageId() > before]
    labels = _labels(spark)
    return Usage(
        spark_task_seconds=round(sum(stage.executorRunTime() for stage in stages) / 1000, 3),
        spark_spilled_bytes=sum(stage.diskBytesSpilled() for stage in stages),
        spark_shuffled_bytes=sum(stage.shuffleWriteBytes() for stage in stages),
        spark_failed_tasks=sum(stage.numFailedTasks() for stage in stages),
        spark_skew=name_skew([_times(stage, labels) for stage in stages]),
    )


def name_skew(stages: Sequence[StageTimes]) -> str:
    """The stage that waited longest for one task, in words; `none` where none did for a second."""
    worst = max(stages, key=lambda stage: stage.slowest - stage.middle, default=None)
    if worst is None or worst.slowest - worst.middle < _SKEWED_SECONDS:
        return "none"
    return (
        f"{worst.label}: the slowest of {worst.tasks:,} tasks took {worst.slowest:,.1f} s, the "
        f"middle one {worst.middle:,.1f} s"
    )


def _times(stage: JavaObject, labels: dict[int, str]) -> StageTimes:
    number = int(stage.stageId())
    label, found = labels.get(number, f"stage {number}"), stage.taskMetricsDistributions()
    if found.isEmpty():
        return StageTimes(label, 0, 0.0, 0.0)
    times = found.get().executorRunTime()
    middle, slowest = (float(times.apply(place)) / 1000 for place in range(2))
    return StageTimes(label, int(stage.numTasks()), middle, slowest)


def _stages(spark: SparkSession) -> list[JavaObject]:
    """All stages that the session remembers, with the times of the middle and the slowest task."""
    context = spark.sparkContext
    jvm, gateway = context._jvm, context._gateway
    assert jvm is not None and gateway is not None
    quantiles = gateway.new_array(jvm.double, 2)
    quantiles[0], quantiles[1] = 0.5, 1.0
    found = _store(spark).stageList(None, False, True, quantiles, jvm.java.util.ArrayList())
    return [found.apply(place) for place in range(found.size())]


def _labels(spark: SparkSession) -> dict[int, str]:
    """Stage to what its work is called (`tasks.progress`)."""
    jobs = _store(spark).jobsList(None)
    labels: dict[int, str] = {}
    for job in (jobs.apply(place) for place in range(jobs.size())):
        stages, group = job.stageIds(), job.jobGroup()
        label = group.get().rpartition("-")[0] if group.isDefined() else ""
        labels |= {stages.apply(n): label for n in range(stages.size()) if label}
    return labels


def _store(spark: SparkSession) -> JavaObject:
    context = spark.sparkContext._jsc.sc()
    # An action is done before the listeners have seen all of it. Where they take longer than Spark
    # itself waits for them, the figures lack the last tasks, which is no reason to fail a job.
    with suppress(Py4JJavaError):
        context.listenerBus().waitUntilEmpty()
    return context.statusStore()
