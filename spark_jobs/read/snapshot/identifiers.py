"""Ids of a snapshot's documents: each fit for later stages, and no document's twice."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.document_ids import find_id_fault
from artifacts.shown import shown_in_line
from artifacts.storage import files
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


def number_repeated_ids(parts: list[Path]) -> int:
    """Number ids that come again, in the order of the parts: `a`, `a#2`, `a#3`.

    A part that needs it is written again. Returns how many ids were given a number. Past one
    machine's memory Spark does the same (`repeated_ids`).
    """
    ids = [_read_ids(part) for part in parts]
    together = pa.chunked_array(ids, pa.string())
    if len(together.unique()) == len(together):
        return 0
    unique = UniqueIds()
    repeated = 0
    for part, of_part in zip(parts, ids, strict=True):
        changed = dict(unique.changes(of_part.to_pylist()))
        repeated += len(changed)
        if changed:
            change_ids(str(part), changed)
    return repeated


def _read_ids(file: Path) -> pa.Array:
    ids = pq.read_table(file, columns=["id"])["id"].combine_chunks()
    return ids if isinstance(ids, pa.Array) else pa.concat_arrays(ids.chunks)


def change_ids(url: str, changed: Mapping[int, str]) -> None:
    """Write a snapshot's file again with other ids in some rows; its row groups stay as they are.

    Doing so twice is doing so once.
    """
    sink = pa.BufferOutputStream()
    parquet = pq.ParquetFile(pa.BufferReader(files.read(url)), page_checksum_verification=True)
    first = 0
    with open_parquet(sink) as writer:
        for number in range(parquet.num_row_groups):
            table = parquet.read_row_group(number)
            ids = table["id"].to_pylist()
            for row in changed.keys() & range(first, first + len(ids)):
                ids[row - first] = changed[row]
            column = pa.array(ids, pa.string())
            writer.write_table(table.set_column(0, table.schema.field("id"), column))
            first += len(ids)
    files.write(url, sink.getvalue().to_pybytes(), sync=False)


class UniqueIds:
    """Keeps 8 bytes an id, not the ids."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def changes(self, ids: Iterable[str]) -> Iterator[tuple[int, str]]:
        """Of ids after those before, the places of those that come again, and their new ids."""
        for place, identifier in enumerate(ids):
            unique = self._make_unique(identifier)
            if unique != identifier:
                yield place, unique

    def _make_unique(self, identifier: str) -> str:
        key = hash64(identifier)
        count = self._seen.get(key, 0) + 1
        self._seen[key] = count
        return identifier if count == 1 else self._make_unique(f"{identifier}#{count}")
