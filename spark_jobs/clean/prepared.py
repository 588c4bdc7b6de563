"""The prepared parts as one table of documents, of which the driver holds the small columns.

The largest are the ids: with the rest, some 150 bytes a document.
"""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError
from spark_jobs.clean.prepare import PreparedPart
from spark_jobs.runtime.parquet import READERS, read_table

FORGOTTEN = "forgotten"
"""Reason of what is left out since somebody asked for it; never shown with its text."""
_COLUMNS = ["id", "source", "text_hash", "characters", "bytes", "fault", "repaired"]


class Prepared:
    """The prepared parts, addressed by document number over all of them."""

    def __init__(
        self,
        parts: list[PreparedPart],
        past_parts: list[PreparedPart],
        forgotten_ids: Sequence[str] = (),
        forgotten_texts: Sequence[str] = (),
    ) -> None:
        """The parts of the corpus, and those of texts that have left it (`clean.history`).

        Args:
            forgotten_ids: documents that are dropped, as are those of `forgotten_texts`, by hash.
        """
        self.parts = parts + past_parts
        with ThreadPoolExecutor(READERS) as readers:
            tables = list(readers.map(lambda part: read_table(part.url, _COLUMNS), self.parts))
        self.offsets = np.concatenate([[0], np.cumsum([table.num_rows for table in tables])])
        """Shape (parts + 1,): where each part's documents begin."""
        self.past = np.arange(self.offsets[-1]) >= self.offsets[len(parts)]
        """Shape (documents,): whether each has left the corpus."""
        documents = pa.concat_tables(tables).combine_chunks()
        # A text that was once in a split stays on record, whatever the settings now say of it.
        fault = pc.if_else(pa.array(self.past), None, documents["fault"]).cast(pa.string())
        is_forgotten = pc.or_(
            pc.is_in(documents["id"], pa.array(forgotten_ids, pa.string())),
            pc.is_in(documents["text_hash"], pa.array(forgotten_texts, pa.string())),
        )
        fault = pc.if_else(is_forgotten, FORGOTTEN, fault)
        documents = documents.drop_columns("fault").append_column("fault", fault)
        self.documents = documents.append_column("past", pa.array(self.past))
        """The small columns, `fault` of `prepare.prepared_schema` among them, and `past`."""

    def refuse_repeated_ids(self) -> None:
        """Raise UserError where two documents have one id."""
        ids = self.documents["id"].filter(pa.array(~self.past))
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

    def by_part(self, numbers: np.ndarray) -> list[tuple[PreparedPart, np.ndarray, np.ndarray]]:
        """Parts with documents of these numbers: `(part, places in numbers, rows of the part)`."""
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], self.offsets)
        found = []
        for part, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first < last:
                places = order[first:last]
                found.append((self.parts[part], places, numbers[places] - self.offsets[part]))
        return found

    def fetch(self, numbers: np.ndarray, column: str) -> Iterator[tuple[np.ndarray, pa.Array]]:
        """`(places in numbers, values)` part by part."""

        def read(one: tuple[PreparedPart, np.ndarray, np.ndarray]) -> tuple[np.ndarray, pa.Array]:
            part, places, rows = one
            values = read_table(part.url, [column])[column].combine_chunks()
            return places, values.take(pa.array(rows))

        with ThreadPoolExecutor(READERS) as readers:
            yield from readers.map(read, self.by_part(numbers))

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
