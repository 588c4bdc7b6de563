"""Runs a Python function over a list of items, a few of them in each Spark task.

The texts themselves never pass through Java: a task reads its parts of a corpus and writes its
results by itself, and only a small record of each comes back.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

from py4j.protocol import Py4JJavaError
from pyspark import RDD, SparkContext
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.progress import Report

Item = TypeVar("Item")

TASKS_PER_CORE = 2
"""Where there are enough items; each costs Spark about 0.01 s whatever its size."""
ITEMS_PER_TASK = 32
"""At most, so that a cluster that grows with the work sees how much there is."""
POLL_SECONDS = 1.0
REPORT_SECONDS = 5.0

_USER_ERROR = re.compile(
    r"^artifacts\.errors\.\w+: (.*?)\s*(?=\n\s+at org\.|\Z)", re.DOTALL | re.MULTILINE
)
"""The last line of a task's Python traceback, before Java's begins."""


def map_tasks(
    spark: SparkSession,
    label: str,
    items: Sequence[Item],
    work: Callable[[Item], dict[str, Any]],
    report: Report,
) -> list[dict[str, Any]]:
    """`work(item)` for every item, in parallel; the records in order.

    Raises:
        UserError: what a task raised as such, with its message.
    """
    if not items:
        return []
    context = spark.sparkContext
    with spread(context, items) as numbered, user_errors(), progress(context, label, report):
        found = numbered.mapValues(work).collectAsMap()
    return [found[number] for number in range(len(items))]


@contextmanager
def spread(context: SparkContext, items: Sequence[Item]) -> Iterator[RDD[tuple[int, Item]]]:
    """Items, each with its number, a few of them in each task.

    An RDD and not a table: Spark's SQL engine takes longer to wake than small tasks to run.
    """
    tasks = count_tasks(len(items), context.defaultParallelism)
    shared = context.broadcast(list(items))
    numbers = context.parallelize(range(tasks), tasks)
    yield numbers.flatMap(lambda task: islice(enumerate(shared.value), task, None, tasks))
    shared.destroy()


def count_tasks(items: int, cores: int) -> int:
    """Into how many tasks to cut the work on so many items."""
    return min(items, max(TASKS_PER_CORE * cores, -(-items // ITEMS_PER_TASK)))


@contextmanager
def user_errors() -> Iterator[None]:
    """Raise a task's UserError as such, without Spark's traceback around it."""
    try:
        yield
    except (PythonException, Py4JJavaError) as error:
        message = _USER_ERROR.search(str(error))
        if message is None:
            raise
        raise UserError(message.group(1).strip()) from error


@contextmanager
def progress(context: SparkContext, label: str, report: Report) -> Iterator[None]:
    """Report the tasks done of the action that the block runs, every few seconds."""
    group = f"{label}-{time.monotonic_ns()}"
    context.setLocalProperty("spark.jobGroup.id", group)
    finished = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(context, group, label, report, finished), daemon=True
    )
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
        context.setLocalProperty("spark.jobGroup.id", None)


def _watch(
    context: SparkContext, group: str, label: str, report: Report, finished: threading.Event
) -> None:
    started = last = time.monotonic()
    while not finished.wait(POLL_SECONDS):
        now = time.monotonic()
        if now - last < REPORT_SECONDS:
            continue
        done, total = _count_tasks(context, group)
        if total:
            last = now
            rest = f", about {(now - started) / done * (total - done):.0f} s to go" if done else ""
            report(f"{label}: {done / total:.0%} done{rest}")


def _count_tasks(context: SparkContext, group: str) -> tuple[int, int]:
    tracker = context.statusTracker()
    done = total = 0
    for job in tracker.getJobIdsForGroup(group):
        information = tracker.getJobInfo(job)
        for stage_id in information.stageIds if information else ():
            stage = tracker.getStageInfo(stage_id)
            if stage:
                done += stage.numCompletedTasks
                total += stage.numTasks
    return done, total
