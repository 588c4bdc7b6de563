"""Runs a Python function over a list of items, one Spark task an item.

The texts themselves never pass through Java: a task reads its part of a corpus and writes its
result by itself, and only a small record of each comes back.
"""

import gc
import json
import re
import zipimport
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.errors import PythonException
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from spark_jobs.progress import Report, progress

Item = TypeVar("Item")


def map_tasks(
    spark: SparkSession,
    label: str,
    items: Sequence[Item],
    work: Callable[[Item], dict[str, Any]],
    report: Report,
) -> list[dict[str, Any]]:
    """`work(item)` for every item, in parallel; the records, which must be JSON, in order.

    Raises:
        UserError: what a task raised as such, with its message.
    """
    if not items:
        return []
    shared = spark.sparkContext.broadcast(list(items))

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        spare_overhead()
        for batch in batches:
            for number in batch["id"].to_pylist():
                record = json.dumps(work(shared.value[number]))
                yield pa.RecordBatch.from_pydict({"number": [number], "record": [record]})

    numbers = spark.range(0, len(items), 1, len(items))
    with user_errors(), progress(spark.sparkContext, label, report):
        rows = numbers.mapInArrow(run, "number long, record string").collect()
    shared.destroy()
    return [json.loads(row["record"]) for row in sorted(rows, key=lambda row: row["number"])]


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
    except PythonException as error:
        message = re.search(r"^artifacts\.errors\.\w+: (.*)", str(error), re.DOTALL | re.MULTILINE)
        if message is None:
            raise
        raise UserError(message.group(1).strip()) from error
