"""Spark's Python workers, each of which ends before it says what a task's first attempt found.

In place of `spark_jobs.worker_daemon` (`spark.python.daemon.module`).
"""

import io
import os
from typing import IO

from pyspark import TaskContext, daemon
from pyspark.worker import main as work

import spark_jobs.worker_daemon  # noqa: F401 - imported for the workers


class Answer(io.BytesIO):
    """What a task answers, and as which attempt."""

    attempt = -1

    def write(self, content: bytes) -> int:  # type: ignore[override]
        if context := TaskContext.get():
            self.attempt = context.attemptNumber()
        return super().write(content)


def work_twice(infile: IO[bytes], outfile: IO[bytes]) -> None:
    """Do a task's work, and answer unless it was the first time."""
    answer = Answer()
    work(infile, answer)
    if answer.attempt == 0:
        os._exit(1)
    outfile.write(answer.getvalue())


if __name__ == "__main__":
    daemon.worker_main = work_twice
    daemon.manager()
