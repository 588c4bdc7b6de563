"""Brings together what belongs to one shard, from tasks that each have something of every shard.

It goes through files, as all else between tasks does: what one piece of work has for all shards is
in one file, of which each shard's task reads its ranges. Through Spark's shuffle, bytes made by
Python pass to Java and back, which cost several times as much processor time as all else that
is done to kept tokens; and files on a bucket outlive the worker that wrote them.
"""

import uuid
from collections import defaultdict
from types import TracebackType
from typing import NamedTuple, Self

import pyarrow as pa

from artifacts.storage import files

BUFFER_BYTES = 64 * 1024 * 1024
"""Held back before it is written, so that a shard's ranges in a file are few."""


class Range(NamedTuple):
    """Where tables for one shard are: an Arrow stream inside a file."""

    url: str
    start: int
    length: int


class ExchangeWriter:
    """Writes tables for shards into one file of a folder."""

    def __init__(self, folder: str) -> None:
        # A second attempt at the same work writes another file.
        self._url = f"{folder}/{uuid.uuid4().hex}"
        self._file = files.open_file(self._url, "wb")
        self._held_bytes = 0
        self._held: dict[int, list[pa.Table]] = defaultdict(list)
        self.ranges: dict[int, list[Range]] = defaultdict(list)
        """Shard number to what was written for it; complete when the writer is closed."""

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

    def add(self, shard: int, table: pa.Table) -> None:
        """Add rows for a shard; all tables have one schema."""
        self._held[shard].append(table)
        self._held_bytes += table.nbytes
        if self._held_bytes >= BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        for shard, tables in sorted(self._held.items()):
            start = self._file.tell()
            with pa.ipc.new_stream(self._file, tables[0].schema) as stream:
                for table in tables:
                    stream.write_table(table)
            self.ranges[shard].append(Range(self._url, start, self._file.tell() - start))
        self._held.clear()
        self._held_bytes = 0


def read_ranges(ranges: list[Range]) -> pa.Table:
    """All rows of the ranges, of which there is at least one."""
    tables = []
    for one in ranges:
        content = files.read_range(one.url, one.start, one.length)
        tables.append(pa.ipc.open_stream(content).read_all())
    return pa.concat_tables(tables)
