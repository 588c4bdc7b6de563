"""Ids of a snapshot's documents: each fit for later stages, and no document's twice."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.document_ids import find_id_fault
from artifacts.shown import shown_in_line
from spark_jobs.read.chunks import Batch, Chunks, hash64
from spark_jobs.read.document import Document
from spark_jobs.read.faults import Fault
from spark_jobs.read.snapshot.chunk_files import open_parquet


def set_bad_ids_aside(chunks: Chunks) -> Chunks:
    """The same chunks, with a fault in place of every document whose id later stages, terminals or
    pages could not bear."""

    def read(numbers: list[int]) -> Iterator[tuple[int, Batch]]:
        for number, batch in chunks.read(numbers):
            yield number, [one if isinstance(one, Fault) else _checked(one) for one in batch]

    return replace(chunks, read=read)


def _checked(document: Document) -> Document | Fault:
    identifier = document.id
    fault = find_id_fault(identifier)
    if fault is None:
        return document
    place = shown_in_line(document.path or document.source)
    return Fault("bad_id", f"{place}: the id '{shown_in_line(identifier[:80])}' {fault}.")


def number_repeated_ids(files: list[Path]) -> int:
    """Number ids that come again, in the order of the files: `a`, `a#2`, `a#3`.

    A file that needs it is written again. Returns how many ids were given a number.
    """
    ids = [_read_ids(file) for file in files]
    together = pa.chunked_array(ids, pa.string())
    if len(together.unique()) == len(together):
        return 0
    unique = _UniqueIds()
    for file, of_file in zip(files, ids, strict=True):
        before = of_file.to_pylist()
        after = [unique.make_unique(identifier) for identifier in before]
        if after != before:
            _rewrite(file, after)
    return unique.repeated


def _read_ids(file: Path) -> pa.Array:
    ids = pq.read_table(file, columns=["id"])["id"].combine_chunks()
    return ids if isinstance(ids, pa.Array) else pa.concat_arrays(ids.chunks)


def _rewrite(file: Path, ids: list[str]) -> None:
    """Replace a file's ids; its row groups stay as they are cut."""
    temporary = file.with_suffix(".tmp")
    parquet = pq.ParquetFile(file)
    first = 0
    with open_parquet(temporary) as writer:
        for number in range(parquet.num_row_groups):
            table = parquet.read_row_group(number)
            column = pa.array(ids[first : first + table.num_rows], pa.string())
            writer.write_table(table.set_column(0, table.schema.field("id"), column))
            first += table.num_rows
    os.replace(temporary, file)


class _UniqueIds:
    """Keeps 8 bytes an id, not the ids."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self.repeated = 0

    def make_unique(self, identifier: str) -> str:
        key = hash64(identifier)
        count = self._seen.get(key, 0) + 1
        self._seen[key] = count
        if count == 1:
            return identifier
        self.repeated += 1
        return self.make_unique(f"{identifier}#{count}")
