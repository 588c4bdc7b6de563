"""Says how far a running Spark action is."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import SparkContext

from artifacts.progress import Report

POLL_SECONDS = 1.0
REPORT_SECONDS = 5.0


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
