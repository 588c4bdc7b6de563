"""How work reaches Spark: a function over a list of items, and joins over all of a corpus.

The texts themselves never pass through Java: a task reads its parts of a corpus and writes its
results by itself, through the same files as everywhere else (`artifacts.storage`), and only a small
record of each comes back. Joins are over DataFrames of small columns, which Spark shuffles, spills
and computes again where an executor was lost.
"""

import functools
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from py4j.protocol import Py4JJavaError
from pyspark import RDD, SparkContext, TaskContext
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from artifacts.errors import UserError
from artifacts.libraries import installed, refuse_changes
from artifacts.numbers import run_starts
from artifacts.progress import REPORT_SECONDS, Report, format_duration
from spark_jobs.runtime.parquet import PartRows, RowLocation, write_part_rows, write_table

Item = TypeVar("Item")

TASKS_PER_CORE = 2
"""If there are enough items; a task costs Spark about 0.01 s whatever its size."""
ITEMS_PER_TASK = 32
"""Maximum, so that a cluster that grows with the pending tasks sees how much work there is."""

# Libraries that decide what tasks make: none may change while they run.
_USED = (
    *("datatrove", "fasttext-numpy2-wheel", "ftfy", "gigatoken"),
    *("lxml", "openpyxl", "pyarrow", "pypdf", "python-docx", "spacy", "striprtf", "tokenizers"),
    "trafilatura",
)
_USER_ERROR = re.compile(
    r"^artifacts\.errors\.\w+: (.*?)\s*(?=\n\s+at org\.|\Z)", re.DOTALL | re.MULTILINE
)
"""The last line of a task's Python traceback, before Java's begins."""


@dataclass(frozen=True)
class JobRun:
    """One run of a job on the driver: what every step of it works with."""

    spark: SparkSession
    report: Report
    scratch: str
    """Folder for what is needed only until the job ends."""
    cache: str | None
    """Folder of what earlier runs made (`artifacts.cache`)."""


def map_tasks(
    spark: SparkSession,
    label: str,
    items: Sequence[Item],
    work: Callable[[Item], dict[str, Any]],
    report: Report,
) -> list[dict[str, Any]]:
    """Run `work(item)` for every item, in parallel; return the records in order.

    Raises:
        UserError: what a task raised as such, with its message.
    """
    if not items:
        return []
    context = spark.sparkContext
    with spread(context, items) as numbered, user_errors(), progress(context, label, report):
        records = numbered.mapValues(work).collectAsMap()
    # Items are dealt out to tasks in turn, so their records arrive in another order.
    return [records[number] for number in range(len(items))]


@contextmanager
def spread(context: SparkContext, items: Sequence[Item]) -> Iterator[RDD[tuple[int, Item]]]:
    """Distribute items, each with its number, over tasks.

    An RDD and not a table: Spark's SQL engine takes longer to start than small tasks to run. A task
    raises UserError if a library has changed since the first one, before it imports that library:
    what it caches would be named after another version.
    """
    tasks = count_tasks(len(items), context.defaultParallelism)
    # Executors get the list once, and not with every task.
    shared = context.broadcast(list(items))
    numbers = context.parallelize(range(tasks), tasks)
    # Sent with the tasks, whose workers compare their own libraries with these.
    begun_with = _libraries()

    def items_of(task: int) -> Iterator[tuple[int, Item]]:
        refuse_changes(begun_with)
        return islice(enumerate(shared.value), task, None, tasks)

    yield numbers.flatMap(items_of)
    shared.destroy()


@cache
def _libraries() -> dict[str, str]:
    """Versions of the tasks' libraries when this process first distributed items."""
    return installed(_USED)


def count_tasks(items: int, cores: int) -> int:
    """The number of tasks for so many items."""
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
    """Report every few seconds how many tasks of the block's action are done."""
    group = f"{label}-{time.monotonic_ns()}"
    # By its group the watcher finds the jobs of this action among those of other threads.
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
        # Nothing is reported once the block has ended.
        watcher.join()
        context.setLocalProperty("spark.jobGroup.id", None)


def _watch(
    context: SparkContext, group: str, label: str, report: Report, finished: threading.Event
) -> None:
    started = time.monotonic()
    while not finished.wait(REPORT_SECONDS):
        done, total = _count_tasks(context, group)
        if total:
            seconds_left = (time.monotonic() - started) / max(done, 1) * (total - done)
            to_go = f", about {format_duration(seconds_left)} to go" if done else ""
            report(f"{label}: {done / total:.0%} done{to_go}")


def _count_tasks(context: SparkContext, group: str) -> tuple[int, int]:
    tracker = context.statusTracker()
    done = total = 0
    for job in tracker.getJobIdsForGroup(group):
        # Spark remembers only the latest jobs and stages, and gives None for others.
        information = tracker.getJobInfo(job)
        for stage_id in information.stageIds if information else ():
            stage = tracker.getStageInfo(stage_id)
            if stage:
                done += stage.numCompletedTasks
                total += stage.numTasks
    return done, total


ROWS_PER_PARTITION = 4_000_000
"""In a shuffle of small rows, such as three numbers of eight bytes."""
BYTES_PER_TASK = 32 * 1024 * 1024
"""Compressed bytes that a task reads of what an earlier step kept."""
BATCH_ROWS = 20_000
"""Rows of small columns that pass between Java and Python at a time."""

_WRITTEN_SCHEMA = pa.schema(
    [("part", pa.int64()), ("url", pa.string()), ("batch", pa.int64()), ("rows", pa.int64())]
)


class Work:
    """Runs joins in one Spark session; `rows` is about what the largest of them shuffles."""

    def __init__(self, spark: SparkSession, rows: int, scratch: str, report: Report) -> None:
        self.spark = spark
        self.partitions = max(spark.sparkContext.defaultParallelism, -(-rows // ROWS_PER_PARTITION))
        """Of a shuffle; changes speed only, never the result."""
        self._scratch = scratch
        self._report = report

    def keep(self, frame: DataFrame, label: str) -> DataFrame:
        """Write the frame as Parquet files, so that a lost executor does not compute it again.

        Spark's own checkpoints compute it twice, once to count the rows, and write it row by row.
        """
        url = f"{self._scratch}/steps/{uuid.uuid4().hex}"
        with self._running(label):
            frame.write.parquet(url)
            # With a given schema, Spark opens no file to infer it.
            return self.spark.read.schema(frame.schema).parquet(url)

    def collect(self, frame: DataFrame, label: str) -> list[dict[str, Any]]:
        """The rows of a frame that is small whatever the corpus."""
        with self._running(label):
            return [row.asDict() for row in frame.collect()]

    def empty(self, schema: pa.Schema) -> DataFrame:
        """A frame without rows."""
        return self.spark.createDataFrame([], from_arrow_schema(schema))

    def over_parts(
        self, items: Sequence[Item], read: Callable[[int, Item], pa.Table], schema: pa.Schema
    ) -> DataFrame:
        """One frame of what `read(number, item)` returns for each part.

        Args:
            items: one per part, saying where the part is.
        """
        tasks = max(1, count_tasks(len(items), self.spark.sparkContext.defaultParallelism))
        numbers = self.spark.range(0, len(items), 1, tasks)
        work = functools.partial(_read_parts, items=list(items), read=read)
        return numbers.mapInArrow(work, from_arrow_schema(schema))

    def keep_parts(
        self,
        items: Sequence[Item],
        read: Callable[[int, Item], pa.Table],
        schema: pa.Schema,
        label: str,
    ) -> DataFrame:
        """The frame of `over_parts`, kept: tasks write a file for each part.

        From these files, rows pass into Java column by column instead of one by one.
        """
        # Without items no folder is written, and Spark refuses a path that does not exist.
        if not items:
            return self.empty(schema)
        url = f"{self._scratch}/steps/{uuid.uuid4().hex}"
        work = functools.partial(_write_part, read=read, folder=url)
        map_tasks(self.spark, label, list(enumerate(items)), work, self._report)
        return self.spark.read.schema(from_arrow_schema(schema)).parquet(url)

    def by_part(self, frame: DataFrame, schema: pa.Schema, label: str) -> PartRows:
        """Group rows by part, and write them where the part's task reads them.

        Args:
            frame: `part` and the columns of `schema`; the rows of a part are ordered by the first
                of these.
        """
        # All rows of a part in one partition, so that one task writes them.
        rows = frame.select("part", *schema.names).repartition("part")
        write = functools.partial(_write_by_part, folder=self._scratch, schema=schema)
        places = rows.sortWithinPartitions("part", schema.names[0]).mapInArrow(
            write, from_arrow_schema(_WRITTEN_SCHEMA)
        )
        with self._running(label):
            records = places.collect()
        return PartRows({row.part: RowLocation(row.url, row.batch, row.rows) for row in records})

    def in_order(self, frame: DataFrame, column: str, schema: pa.Schema) -> PartRows:
        """Write all rows in the order of a column, and number their batches in that order."""
        ordered = frame.select(*schema.names).orderBy(column)
        write = functools.partial(_write_ordered, folder=self._scratch, schema=schema)
        with self._running("sorting"):
            records = ordered.mapInArrow(write, from_arrow_schema(_WRITTEN_SCHEMA)).collect()
        # Records arrive as tasks end; the numbers of Spark's partitions follow the column.
        records.sort(key=lambda row: (row.part, row.batch))
        places = (RowLocation(row.url, row.batch, row.rows) for row in records)
        return PartRows(dict(enumerate(places)))

    @contextmanager
    def _running(self, label: str) -> Iterator[None]:
        """Run an action under these settings, and restore the session's own afterwards."""
        wanted = {
            "spark.sql.shuffle.partitions": str(self.partitions),
            # Splits the partitions of keys that very many rows share.
            "spark.sql.adaptive.enabled": "true",
            # The driver builds the table of a broadcast join. Spark estimates its size from
            # compressed bytes, but columns of numbers take ten times as many in memory.
            "spark.sql.autoBroadcastJoinThreshold": "-1",
            "spark.sql.files.maxPartitionBytes": str(BYTES_PER_TASK),
            "spark.sql.execution.arrow.maxRecordsPerBatch": str(BATCH_ROWS),
        }
        before = {key: self.spark.conf.get(key) for key in wanted}
        try:
            for key, value in wanted.items():
                self.spark.conf.set(key, value)
            with user_errors(), progress(self.spark.sparkContext, label, self._report):
                yield
        finally:
            for key, value in before.items():
                self.spark.conf.set(key, value)


def _read_parts(
    batches: Iterator[pa.RecordBatch],
    items: list[Item],
    read: Callable[[int, Item], pa.Table],
) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for number in batch.column(0).to_pylist():
            yield from read(number, items[number]).to_batches(BATCH_ROWS)


def _write_part(
    item: tuple[int, Item], read: Callable[[int, Item], pa.Table], folder: str
) -> dict[str, Any]:
    number, part = item
    # A second attempt at the same work writes the same file.
    write_table(f"{folder}/{number:08d}.parquet", read(number, part))
    return {}


def _write_by_part(
    batches: Iterator[pa.RecordBatch], folder: str, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Write rows that arrive in the order of their parts; return where they are."""
    tables = ((number, pa.Table.from_batches(held)) for number, held in _by_number(batches))
    parts = ((n, table.select(schema.names).cast(schema)) for n, table in tables)
    rows = ((number, table.combine_chunks().to_batches()[0]) for number, table in parts)
    places = write_part_rows(folder, schema, rows).places
    yield _records([(part, *place) for part, place in places.items()])


def _by_number(
    batches: Iterator[pa.RecordBatch],
) -> Iterator[tuple[int, list[pa.RecordBatch]]]:
    """Group rows by the number in their first column, by which they are sorted."""
    number = -1
    held: list[pa.RecordBatch] = []
    for batch in batches:
        numbers = batch.column(0).to_numpy()
        starts = np.flatnonzero(run_starts(numbers)).tolist()
        for first, last in zip(starts, [*starts[1:], len(numbers)], strict=True):
            # The rows of a number may go on in the next batch.
            if held and numbers[first] != number:
                yield number, held
                held = []
            number = int(numbers[first])
            held.append(batch.slice(first, last - first))
    if held:
        yield number, held


def _write_ordered(
    batches: Iterator[pa.RecordBatch], folder: str, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Write rows that arrive in the order of Spark's partitions; return where they are."""
    numbered = ((number, batch.cast(schema)) for number, batch in enumerate(filter(len, batches)))
    places = write_part_rows(folder, schema, numbered).places
    # `Work.in_order` sorts the records by it.
    partition = TaskContext.get().partitionId()
    yield _records([(partition, *place) for place in places.values()])


def _records(rows: list[tuple[int, str, int, int]]) -> pa.RecordBatch:
    records = [dict(zip(_WRITTEN_SCHEMA.names, row, strict=True)) for row in rows]
    return pa.RecordBatch.from_pylist(records, _WRITTEN_SCHEMA)
