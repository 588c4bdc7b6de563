"""Rows for the parts of a corpus, such as those chosen of each: Arrow files of a batch a part.

Whoever finds them writes them, and the task that reads a part gets its rows there, so that they
need not be held by one process.
"""

import itertools
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from artifacts.storage import files


class Place(NamedTuple):
    """Where the rows for one part are."""

    url: str
    batch: int
    rows: int

    def read(self) -> pa.RecordBatch:
        """The rows, of the schema that they were written with."""
        with files.open_file(self.url) as file:
            return pa.ipc.open_file(file).get_batch(self.batch)


@dataclass(frozen=True)
class PartRows:
    """Rows for parts, by the part's number; for a part without any there is no place."""

    places: dict[int, Place]

    @property
    def count(self) -> int:
        """Rows in all."""
        return sum(place.rows for place in self.places.values())

    def groups(self, size: int) -> list[list[tuple[int, Place, int, int]]]:
        """The rows in the order of the parts, cut into groups of `size`.

        Returns:
            For each group its parts: `(number, place, first, last)`, where `first` and `last` are
            bounds among the part's chosen rows.
        """
        groups: list[list[tuple[int, Place, int, int]]] = []
        before = 0
        for number, place in sorted(self.places.items()):
            first = 0
            while first < place.rows:
                if before % size == 0:
                    groups.append([])
                last = min(place.rows, first + size - before % size)
                groups[-1].append((number, place, first, last))
                before += last - first
                first = last
        return groups


def write_part_rows(
    folder: str, schema: pa.Schema, batches: Iterable[tuple[int, pa.RecordBatch]]
) -> PartRows:
    """Write rows into one file of a folder.

    Args:
        batches: a part's number and its rows, each part once.
    """
    # A second attempt at the same work writes another file.
    url = f"{folder}/rows-{uuid.uuid4().hex}.arrow"
    places = {}
    with files.open_file(url, "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for batch, (number, rows) in enumerate(batches):
            writer.write_batch(rows)
            places[number] = Place(url, batch, rows.num_rows)
    return PartRows(places)


def split_rows(
    numbers: np.ndarray, offsets: Sequence[int] | np.ndarray, columns: pa.Table
) -> Iterable[tuple[int, pa.RecordBatch]]:
    """Rows given by numbers over all parts as those of each part, for `write_part_rows`.

    Args:
        numbers: in rising order.
        offsets: shape (parts + 1,), the number of each part's first row.
        columns: what goes with each, in the order of `numbers`.
    """
    bounds = np.searchsorted(numbers, offsets)
    for part, (first, last) in enumerate(itertools.pairwise(bounds.tolist())):
        if first < last:
            rows = pa.array(numbers[first:last] - offsets[part])
            table = columns.slice(first, last - first).combine_chunks()
            arrays = [column.combine_chunks() for column in table.columns]
            yield part, pa.record_batch([rows, *arrays], ["row", *table.column_names])
