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
"""Where there are enough items; each costs Spark about 0.01 s whatever its size."""
ITEMS_PER_TASK = 32
"""At most, so that a cluster that grows with the work sees how much there is."""

_USED = (
    *("datatrove", "fasttext-numpy2-wheel", "ftfy", "gigatoken"),
    *("lxml", "openpyxl", "pyarrow", "pypdf", "python-docx", "spacy", "striprtf", "tokenizers"),
    "trafilatura",
)
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

    An RDD and not a table: Spark's SQL engine takes longer to wake than small tasks to run. A
    task raises UserError where a library has changed since the first one, before it imports that:
    what it caches would have the name of another version.
    """
    tasks = count_tasks(len(items), context.defaultParallelism)
    shared = context.broadcast(list(items))
    numbers = context.parallelize(range(tasks), tasks)
    begun_with = _libraries()

    def items_of(task: int) -> Iterator[tuple[int, Item]]:
        refuse_changes(begun_with)
        return islice(enumerate(shared.value), task, None, tasks)

    yield numbers.flatMap(items_of)
    shared.destroy()


@cache
def _libraries() -> dict[str, str]:
    """Those that tasks use, as they were when this process first gave some out."""
    return installed(_USED)


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
        watcher.join()
        context.setLocalProperty("spark.jobGroup.id", None)


def _watch(
    context: SparkContext, group: str, label: str, report: Report, finished: threading.Event
) -> None:
    started = time.monotonic()
    while not finished.wait(REPORT_SECONDS):
        done, total = _count_tasks(context, group)
        if total:
            rest = (time.monotonic() - started) / max(done, 1) * (total - done)
            to_go = f", about {format_duration(rest)} to go" if done else ""
            report(f"{label}: {done / total:.0%} done{to_go}")


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


ROWS_PER_PARTITION = 4_000_000
"""Of a shuffle; of small rows, such as three numbers of eight bytes."""
BYTES_PER_TASK = 32 * 1024 * 1024
"""Of compressed columns, where a step reads what another has kept."""
BATCH_ROWS = 20_000
"""Of small columns, between Java and Python."""

_WRITTEN_SCHEMA = pa.schema(
    [("part", pa.int64()), ("url", pa.string()), ("batch", pa.int64()), ("rows", pa.int64())]
)


class Work:
    """Joins in one Spark session, of which the largest shuffles about so many rows."""

    def __init__(self, spark: SparkSession, rows: int, scratch: str, report: Report) -> None:
        self.spark = spark
        self.partitions = max(spark.sparkContext.defaultParallelism, -(-rows // ROWS_PER_PARTITION))
        """Of a shuffle; changes speed only, never what is made."""
        self._scratch = scratch
        self._report = report

    def keep(self, frame: DataFrame, label: str) -> DataFrame:
        """The frame as Parquet files: made once, and read again from storage whoever is lost.

        Spark's own checkpoints are made twice, once to count the rows, and written row by row.
        """
        url = f"{self._scratch}/steps/{uuid.uuid4().hex}"
        with self._running(label):
            frame.write.parquet(url)
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
        """What `read(number, item)` finds in each part, as one frame.

        Args:
            items: one for each part; what says where the part is.
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

        Rows pass into Java from those, a column at a time, in place of one by one.
        """
        if not items:
            return self.empty(schema)
        url = f"{self._scratch}/steps/{uuid.uuid4().hex}"
        work = functools.partial(_write_part, read=read, folder=url)
        map_tasks(self.spark, label, list(enumerate(items)), work, self._report)
        return self.spark.read.schema(from_arrow_schema(schema)).parquet(url)

    def by_part(self, frame: DataFrame, schema: pa.Schema, label: str) -> PartRows:
        """Bring rows to their parts.

        Args:
            frame: `part` and the columns of `schema`, by the first of which rows of a part are
                ordered.
        """
        # All rows of a part in one partition, so that one task writes them.
        rows = frame.select("part", *schema.names).repartition("part")
        write = functools.partial(_write_by_part, folder=self._scratch, schema=schema)
        written = rows.sortWithinPartitions("part", schema.names[0]).mapInArrow(
            write, from_arrow_schema(_WRITTEN_SCHEMA)
        )
        with self._running(label):
            records = written.collect()
        return PartRows({row.part: RowLocation(row.url, row.batch, row.rows) for row in records})

    def in_order(self, frame: DataFrame, column: str, schema: pa.Schema) -> PartRows:
        """All rows, numbered batch by batch in the order of a column."""
        ordered = frame.select(*schema.names).orderBy(column)
        write = functools.partial(_write_ordered, folder=self._scratch, schema=schema)
        with self._running("sorting"):
            records = ordered.mapInArrow(write, from_arrow_schema(_WRITTEN_SCHEMA)).collect()
        # They arrive as tasks end; Spark's partitions are in the order of the column.
        records.sort(key=lambda row: (row.part, row.batch))
        places = (RowLocation(row.url, row.batch, row.rows) for row in records)
        return PartRows(dict(enumerate(places)))

    @contextmanager
    def _running(self, label: str) -> Iterator[None]:
        """Run an action under the settings for it, which are the session's own again afterwards."""
        wanted = {
            "spark.sql.shuffle.partitions": str(self.partitions),
            # Splits the partitions of keys that very many rows share.
            "spark.sql.adaptive.enabled": "true",
            # A table that is sent to all executors is built on the driver, and is called small by
            # its compressed bytes, of which columns of numbers have ten times as many there.
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
    """Write rows, which come in the order of their parts, and say where."""
    tables = ((number, pa.Table.from_batches(held)) for number, held in _by_number(batches))
    chosen = ((n, table.select(schema.names).cast(schema)) for n, table in tables)
    rows = ((number, table.combine_chunks().to_batches()[0]) for number, table in chosen)
    written = write_part_rows(folder, schema, rows).places
    yield _records([(part, *place) for part, place in written.items()])


def _by_number(
    batches: Iterator[pa.RecordBatch],
) -> Iterator[tuple[int, list[pa.RecordBatch]]]:
    """The rows of each number in the first column, which come one number after another."""
    number = -1
    held: list[pa.RecordBatch] = []
    for batch in batches:
        numbers = batch.column(0).to_numpy()
        starts = np.flatnonzero(run_starts(numbers)).tolist()
        for first, last in zip(starts, [*starts[1:], len(numbers)], strict=True):
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
    """Write rows, which come in the order of Spark's partitions, and say where."""
    numbered = ((number, batch.cast(schema)) for number, batch in enumerate(filter(len, batches)))
    written = write_part_rows(folder, schema, numbered).places
    partition = TaskContext.get().partitionId()
    yield _records([(partition, *place) for place in written.values()])


def _records(rows: list[tuple[int, str, int, int]]) -> pa.RecordBatch:
    named = [dict(zip(_WRITTEN_SCHEMA.names, row, strict=True)) for row in rows]
    return pa.RecordBatch.from_pylist(named, _WRITTEN_SCHEMA)
