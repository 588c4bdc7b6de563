"""The prepared parts as one table of documents, of which the driver holds the small columns."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError
from spark_jobs.parquet import READERS, read_table

_COLUMNS = ["id", "source", "cluster", "characters", "bytes", "reason", "repaired"]


class Prepared:
    """The prepared parts, addressed by document number over all of them."""

    def __init__(self, urls: list[str], pinned_parts: int) -> None:
        """The last `pinned_parts` of the parts are pinned."""
        self.urls = urls
        with ThreadPoolExecutor(READERS) as readers:
            tables = list(readers.map(lambda url: read_table(url, _COLUMNS), urls))
        self.offsets = np.concatenate([[0], np.cumsum([table.num_rows for table in tables])])
        documents = pa.concat_tables(tables).combine_chunks()
        first_pinned = self.offsets[len(urls) - pinned_parts]
        self.pinned = np.arange(documents.num_rows) >= first_pinned
        reason = pc.if_else(pa.array(self.pinned), None, documents["reason"])
        documents = documents.set_column(5, "reason", reason.cast(pa.string()))
        self.documents = documents.append_column("pinned", pa.array(self.pinned))

    def refuse_repeated_ids(self) -> None:
        """Raise UserError where two documents have one id."""
        ids = self.documents["id"].filter(pa.array(~self.pinned))
        if len(ids.unique()) == len(ids):
            return
        counts = pc.value_counts(ids)
        repeated = counts.filter(pc.greater(counts.field("counts"), 1)).to_pylist()
        named = ", ".join(
            f"{item['values']!r} ({item['counts']} times)"
            for item in sorted(repeated, key=lambda item: item["values"])[:3]
        )
        raise UserError(
            f"The raw corpus holds the same id more than once: {named}. Every document needs an id "
            "of its own: choose another `id_column`, or leave it out."
        )

    def fetch(self, numbers: np.ndarray, column: str) -> Iterator[tuple[np.ndarray, pa.Array]]:
        """`(places in numbers, values)` part by part, of any document numbers."""
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], self.offsets)
        wanted = [
            (part, order[first:last])
            for part, (first, last) in enumerate(itertools.pairwise(bounds))
            if first < last
        ]

        def read(one: tuple[int, np.ndarray]) -> tuple[np.ndarray, pa.Array]:
            part, places = one
            values = read_table(self.urls[part], [column])[column].combine_chunks()
            return places, values.take(pa.array(numbers[places] - self.offsets[part]))

        with ThreadPoolExecutor(READERS) as readers:
            yield from readers.map(read, wanted)

    def fetch_matrix(self, numbers: np.ndarray, column: str, dtype: type) -> np.ndarray:
        """A fixed-size binary column as a matrix, one row a number."""
        result: np.ndarray = np.empty((len(numbers), 0), dtype)
        for places, values in self.fetch(numbers, column):
            width = values.type.byte_width // result.itemsize
            if result.shape[1] != width:
                result = np.empty((len(numbers), width), dtype)
            content: np.ndarray = np.frombuffer(values.buffers()[1], dtype)
            result[places] = content[values.offset * width :][: len(places) * width].reshape(
                -1, width
            )
        return result
