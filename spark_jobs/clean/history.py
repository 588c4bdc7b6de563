"""What earlier corpora of a lineage were divided into, and the texts that have left since.

Every clean corpus holds the record: its own documents with split and slice, and under `past/` each
text that was once in a split and is none of its documents now. So a copy of what was trained on is
known as such when it comes back, and can never be held out; nor can held-out text be trained on.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from artifacts.progress import Report
from artifacts.storage import files
from spark_jobs.runtime.parquet import READERS, Part, find_parts, write_table
from spark_jobs.runtime.part_rows import PartRows, Place
from spark_jobs.runtime.tasks import map_tasks

PAST_FOLDER = "past"
_SMALL = ["id", "text_hash", "split", "slice"]
RECORD_COLUMNS = [*_SMALL, "text", "source"]
"""What is kept of a text: what decides its split, and the text itself."""
_TEXTS_IN_FILE = 5_000


@dataclass(frozen=True)
class History:
    """The record in a clean corpus."""

    parts: list[Part]
    """The corpus's own parts, then those of its past texts."""

    @cached_property
    def documents(self) -> pa.Table:
        """`id`, `text_hash`, `split`, `slice` of every text, part by part."""
        with ThreadPoolExecutor(READERS) as readers:
            tables = list(readers.map(lambda part: part.read(_SMALL), self.parts))
        return pa.concat_tables(tables).combine_chunks()

    @cached_property
    def slice(self) -> int:
        """Number of the slice that arrives with the corpus after this one."""
        return int(self.documents["slice"].to_numpy().max()) + 1

    def missing(self, hashes: pa.ChunkedArray) -> np.ndarray:
        """Places in `documents` of the texts whose hash is none of these."""
        return np.flatnonzero(~np.asarray(pc.is_in(self.documents["text_hash"], hashes)))


def read_history(clean_corpus: str | None) -> History | None:
    """The record of an earlier clean corpus; None before there is one.

    Raises:
        UserError: the folder holds no clean corpus.
    """
    if clean_corpus is None:
        return None
    parts = find_parts(clean_corpus, RECORD_COLUMNS, "clean_corpus")
    past = f"{clean_corpus}/{PAST_FOLDER}"
    if files.exists(past):
        parts += find_parts(past, RECORD_COLUMNS, "clean_corpus")
    return History(parts)


def write_past(
    spark: SparkSession, history: History, chosen: PartRows, folder: str, report: Report
) -> list[Part]:
    """Write some of the record's texts into a folder, in their order, and give its parts."""
    if not chosen.count:
        return []
    groups = [
        (number, [(history.parts[part], *place) for part, *place in group])
        for number, group in enumerate(chosen.groups(_TEXTS_IN_FILE))
    ]
    map_tasks(spark, "reading past texts", groups, partial(_write_group, folder=folder), report)
    return find_parts(folder, RECORD_COLUMNS, "clean_corpus")


def _write_group(
    group: tuple[int, list[tuple[Part, Place, int, int]]], folder: str
) -> dict[str, Any]:
    number, wanted = group
    tables = [
        part.read(RECORD_COLUMNS).select(RECORD_COLUMNS).take(place.read()["row"][first:last])
        for part, place, first, last in wanted
    ]
    # What a part was made of says nothing of what is left of it.
    table = pa.concat_tables([table.replace_schema_metadata() for table in tables])
    write_table(f"{folder}/part-{number:05d}.parquet", table)
    return {}
