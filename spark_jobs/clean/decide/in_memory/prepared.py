"""The prepared parts as one table of documents, of which the driver holds the small columns.

The largest are the ids: with the rest, some 150 bytes a document.
"""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from spark_jobs.clean.decide.documents import DocumentPart, Forgotten
from spark_jobs.clean.prepare import matrix_of
from spark_jobs.runtime.parquet import READERS


class Prepared:
    """The prepared parts, addressed by document number over all of them."""

    def __init__(self, parts: list[DocumentPart], forgotten: Forgotten) -> None:
        self.parts = parts
        with ThreadPoolExecutor(READERS) as readers:
            tables = list(readers.map(lambda part: part.read(forgotten), parts))
        self.offsets = np.concatenate([[0], np.cumsum([table.num_rows for table in tables])])
        """Shape (parts + 1,): where each part's documents begin."""
        self.documents = pa.concat_tables(tables).combine_chunks()
        """Rows of `documents.DOCUMENT_SCHEMA`."""

    def by_part(self, numbers: np.ndarray) -> list[tuple[DocumentPart, np.ndarray, np.ndarray]]:
        """Parts with documents of these numbers: `(part, places in numbers, rows of the part)`."""
        order = np.argsort(numbers, kind="stable")
        bounds = np.searchsorted(numbers[order], self.offsets)
        found = []
        for part, (first, last) in enumerate(itertools.pairwise(bounds)):
            if first < last:
                places = order[first:last]
                found.append((self.parts[part], places, numbers[places] - self.offsets[part]))
        return found

    def fetch_matrix(self, numbers: np.ndarray, column: str, dtype: type) -> np.ndarray:
        """A fixed-size binary column as a matrix, one row a number."""

        def read(one: tuple[DocumentPart, np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
            part, places, rows = one
            return places, matrix_of(part.read_rows(column, pa.array(rows)), dtype)

        result: np.ndarray = np.empty((len(numbers), 0), dtype)
        with ThreadPoolExecutor(READERS) as readers:
            for places, values in readers.map(read, self.by_part(numbers)):
                if result.shape[1] != values.shape[1]:
                    result = np.empty((len(numbers), values.shape[1]), dtype)
                result[places] = values
        return result
