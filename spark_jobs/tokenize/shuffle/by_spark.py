"""Rows go through Spark's own shuffle, which spills them, and sends them again from lost executors.

The driver hears of one record a receiver, and of nothing between senders and receivers.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.session import ARROW_BATCH_ROWS
from spark_jobs.runtime.work import Work, by_number
from spark_jobs.tokenize.shuffle.sending import Sending, Sent

RECEIVERS_PER_TASK = 4
"""Of a shuffle: the fewer tasks, the longer the stretches that each reads of another's rows."""

_TO = pa.field("to", pa.int64())
_RECORD_SCHEMA = pa.schema([("record", pa.string())])


def shuffle_by_spark(sending: Sending) -> list[dict[str, Any]]:
    """As `choice.shuffle`."""
    work = Work(sending.spark, 0, sending.scratch, sending.report)
    schema = pa.schema([_TO, *sending.schema])
    read = partial(_addressed, send=sending.send, schema=schema)
    rows = work.over_parts(list(sending.parts), read, schema)
    tasks = max(work.partitions, -(-sending.receivers // RECEIVERS_PER_TASK))
    arrived = rows.repartition(tasks, _TO.name).sortWithinPartitions(_TO.name)
    receive = partial(_receive, receive=sending.receive)
    records = arrived.mapInArrow(receive, from_arrow_schema(_RECORD_SCHEMA))
    label = "tokenizing and writing shards"
    found = work.collect(records, label, ARROW_BATCH_ROWS)
    return [json.loads(row["record"]) for row in found]


def _addressed(
    number: int,
    part: Part,
    send: Callable[[tuple[int, Part]], list[Sent]],
    schema: pa.Schema,
) -> pa.Table:
    """All that a part sends, as rows of one schema with the number that each is sent to."""
    return pa.concat_tables(
        pa.table([pa.array(to), *_widened(rows, schema)], schema)
        for to, rows in send((number, part))
    )


def _widened(rows: pa.Table, schema: pa.Schema) -> Iterator[pa.ChunkedArray]:
    for field in list(schema)[1:]:
        if field.name in rows.column_names:
            yield rows[field.name].cast(field.type)
        else:
            yield pa.chunked_array([pa.nulls(rows.num_rows, field.type)])


def _receive(
    batches: Iterator[pa.RecordBatch],
    receive: Callable[[tuple[int, pa.Table]], dict[str, Any]],
) -> Iterator[pa.RecordBatch]:
    """Receive what comes in the order of the receivers."""
    for number, held in by_number(batches):
        record = json.dumps(receive((number, pa.Table.from_batches(held))))
        yield pa.record_batch([[record]], _RECORD_SCHEMA)
