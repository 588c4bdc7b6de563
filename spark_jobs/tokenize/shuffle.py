"""Tokens on their way from the parts that hold their documents to the shards that these go to.

They go through Spark's own shuffle, which spills them, and sends them again from lost executors.
All rows of a part for one receiver are one record, an Arrow stream: Java, where each record costs
more than its bytes, moves few of them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from artifacts.progress import Report
from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.tasks import progress, spread, user_errors


class Sent(NamedTuple):
    """Rows of one schema, and the number that each is sent to."""

    to: np.ndarray
    rows: pa.Table


def shuffle(
    spark: SparkSession,
    parts: Sequence[Part],
    send: Callable[[tuple[int, Part]], list[Sent]],
    receive: Callable[[tuple[int, pa.Table]], dict[str, Any]],
    receivers: int,
    report: Report,
) -> list[dict[str, Any]]:
    """Bring all rows to where they are sent.

    The driver hears of one record a receiver, and of nothing between senders and receivers.

    Args:
        send: what a part, given with its number, has for whom; rows that are sent to one number
            have one schema.
        receive: makes of all rows that were sent to a number, in any order, a record of what became
            of them.
        receivers: how many numbers there are, of which no two have the same remainder by it.

    Returns:
        The records of the numbers that got any rows, in no order.

    Raises:
        UserError: what a task raised as such, with its message.
    """
    context = spark.sparkContext
    label = "tokenizing and writing shards"
    with spread(context, parts) as numbered, user_errors(), progress(context, label, report):
        sent = numbered.flatMap(partial(_streams, send=send))
        arrived = sent.partitionBy(receivers, int)
        return arrived.mapPartitions(partial(_receive, receive=receive)).collect()


def _streams(
    part: tuple[int, Part], send: Callable[[tuple[int, Part]], list[Sent]]
) -> Iterator[tuple[int, bytes]]:
    """All that a part sends: each receiver's number, and its rows as an Arrow stream."""
    for to, rows in send(part):
        order = np.argsort(to, kind="stable")
        ordered = rows.combine_chunks().take(order)
        found = np.unique(to[order], return_index=True, return_counts=True)
        for number, first, count in zip(*(column.tolist() for column in found), strict=True):
            yield number, _to_stream(ordered.slice(first, count))


def _to_stream(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema) as stream:
        stream.write_table(rows)
    return sink.getvalue().to_pybytes()


def _receive(
    arrived: Iterable[tuple[int, bytes]],
    receive: Callable[[tuple[int, pa.Table]], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Receive what came for one number."""
    streams = list(arrived)
    if streams:
        tables = [pa.ipc.open_stream(content).read_all() for _, content in streams]
        yield receive((streams[0][0], pa.concat_tables(tables)))
