"""Runs a Python function over a list of items, one Spark task an item.

The texts themselves never pass through Java: a task reads its part of a corpus and writes its
result by itself, and only a small record of each comes back.
"""

import gc
import re
import zipimport
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from py4j.protocol import Py4JJavaError
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from spark_jobs.progress import Report, progress

Item = TypeVar("Item")

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
    shared = context.broadcast(list(items))

    def run(number: int) -> dict[str, Any]:
        spare_overhead()
        return work(shared.value[number])

    # An RDD and not a table: Spark's SQL engine takes longer to wake than small tasks to run.
    numbers = context.parallelize(range(len(items)), len(items))
    with user_errors(), progress(context, label, report):
        records = numbers.map(run).collect()
    shared.destroy()
    return records


def spare_overhead() -> None:
    """Spare this worker what PySpark does before and after every task, whatever its size.

    Before, it invalidates Python's import caches; most of its own modules come from archives, whose
    directories Python then parses again (0.06 to 0.09 s), though they never change while a worker
    lives. After, it collects garbage, which walks over every object of the imported modules.
    """
    zipimport.zipimporter.invalidate_caches = lambda self: None  # type: ignore[method-assign]
    gc.freeze()


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
