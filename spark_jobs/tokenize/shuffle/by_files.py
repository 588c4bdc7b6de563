"""Rows go through files: what one task sends is in one file, of which receivers read their ranges.

Nothing passes to Java and back, and files on a bucket outlive the worker that wrote them. The
driver lists the ranges, as many as there are files times receivers.
"""

import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import pyarrow as pa

from artifacts.storage import files
from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.tasks import count_tasks, map_tasks
from spark_jobs.tokenize.shuffle.sending import Sending, Sent

BUFFER_BYTES = 64 * 1024 * 1024
"""Held back before it is written, so that a receiver's ranges in a file are few."""


class Range(NamedTuple):
    """Where rows for one receiver are: an Arrow stream inside a file."""

    url: str
    start: int
    length: int


def count_files(sending: Sending) -> int:
    """Into how many files the rows would go."""
    return count_tasks(len(sending.parts), sending.spark.sparkContext.defaultParallelism)


def shuffle_by_files(sending: Sending) -> list[dict[str, Any]]:
    """As `choice.shuffle`."""
    spark, report = sending.spark, sending.report
    tasks = count_files(sending)
    groups = [list(enumerate(sending.parts))[task::tasks] for task in range(tasks)]
    write = partial(_write_file, send=sending.send, folder=f"{sending.scratch}/shuffle")
    ranges: dict[int, list[Range]] = defaultdict(list)
    for record in map_tasks(spark, "tokenizing", groups, write, report):
        for number, found in record["ranges"].items():
            ranges[number] += found
    receive = partial(_read_and_receive, receive=sending.receive)
    return map_tasks(spark, "writing shards", sorted(ranges.items()), receive, report)


def _write_file(
    parts: Sequence[tuple[int, Part]],
    send: Callable[[tuple[int, Part]], list[Sent]],
    folder: str,
) -> dict[str, Any]:
    """Write what parts send into one file: `ranges`, each receiver to where its rows are."""
    with RangeWriter(folder) as writer:
        for part in parts:
            for to, rows in send(part):
                for number in np.unique(to).tolist():
                    writer.add(number, rows.filter(pa.array(to == number)))
    return {"ranges": dict(writer.ranges)}


def _read_and_receive(
    ranges: tuple[int, list[Range]],
    receive: Callable[[tuple[int, pa.Table]], dict[str, Any]],
) -> dict[str, Any]:
    return receive((ranges[0], read_ranges(ranges[1])))


class RangeWriter:
    """Writes rows for many receivers into one file of a folder."""

    def __init__(self, folder: str) -> None:
        # A second attempt at the same work writes another file.
        self._url = f"{folder}/{uuid.uuid4().hex}"
        self._file = files.open_file(self._url, "wb")
        self._held_bytes = 0
        self._held: dict[int, list[pa.Table]] = defaultdict(list)
        self.ranges: dict[int, list[Range]] = defaultdict(list)
        """Receiver to what was written for it; complete when the writer is closed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._flush()
        self._file.close()

    def add(self, number: int, rows: pa.Table) -> None:
        """Add rows for a receiver; all of them have one schema."""
        self._held[number].append(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes >= BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        for number, tables in sorted(self._held.items()):
            start = self._file.tell()
            with pa.ipc.new_stream(self._file, tables[0].schema) as stream:
                for table in tables:
                    stream.write_table(table)
            self.ranges[number].append(Range(self._url, start, self._file.tell() - start))
        self._held.clear()
        self._held_bytes = 0


def read_ranges(ranges: list[Range]) -> pa.Table:
    """All rows of the ranges, of which there is at least one."""
    tables = []
    for one in ranges:
        content = files.read_range(one.url, one.start, one.length)
        tables.append(pa.ipc.open_stream(content).read_all())
    return pa.concat_tables(tables)
