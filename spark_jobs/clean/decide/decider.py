"""The interface by which the job decides which documents stay, and what its deciders share.

There are two deciders, whose results are equal to the byte: one holds a row of every document in
the driver's memory (`in_memory`), the other leaves all to Spark's joins (`by_spark`). Both read the
small columns of prepared documents here, and follow the rules of `spark_jobs.clean.history`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from spark_jobs.clean.forgotten import FORGOTTEN, SIMILAR, ForgottenTexts
from spark_jobs.clean.history import History, codes_of
from spark_jobs.clean.prepare import PreparedPart
from spark_jobs.runtime import parquet
from spark_jobs.runtime.parquet import PartRows
from spark_jobs.runtime.tasks import JobRun, map_tasks
from spark_jobs.settings import CleanCorpusSettings

DOCUMENT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("text_hash", pa.string()),
        ("characters", pa.int64()),
        ("bytes", pa.int64()),
        ("fault", pa.string()),
        ("repaired", pa.bool_()),
        ("shape", pa.int64()),
        ("label", pa.string()),
        ("past", pa.bool_()),
        ("recorded_split", pa.int8()),
        ("recorded_slice", pa.int32()),
    ]
)
"""A prepared document (`prepare.prepared_schema`). `past` says whether it has left the sources; if
so, the code of its split and its slice are those on record, else 0."""


def read_documents(part: PreparedPart, forgotten: ForgottenTexts) -> pa.Table:
    """A part's documents, as rows of `DOCUMENT_SCHEMA`."""
    names = [name for name in DOCUMENT_SCHEMA.names if "record" not in name and name != "past"]
    documents = part.read(names)
    count, is_past = documents.num_rows, part.record is not None
    # Codes and slices of the record; of documents in the sources, the deciders look them up.
    split, slices = np.zeros((2, count), np.int64)
    if part.record:
        recorded = part.record.read(["split", "slice"])
        split, slices = codes_of(recorded["split"]), recorded["slice"].to_numpy()
    columns = {name: documents[name] for name in names} | {
        "fault": _faults(documents, forgotten, is_past),
        "past": pa.array(np.full(count, is_past)),
        "recorded_split": pa.array(split, pa.int8()),
        "recorded_slice": pa.array(slices.astype(np.int32)),
    }
    return pa.table(columns, DOCUMENT_SCHEMA)


def _faults(documents: pa.Table, forgotten: ForgottenTexts, is_past: bool) -> pa.ChunkedArray:
    # A text that was once in a split stays on record, whatever the settings now say of it.
    nothing = pa.chunked_array([pa.nulls(documents.num_rows, pa.string())])
    is_forgotten = pc.or_(
        pc.is_in(documents["id"], pa.array(forgotten.ids, pa.string())),
        pc.is_in(documents["text_hash"], pa.array(forgotten.texts, pa.string())),
    )
    is_similar = pc.is_in(documents["text_hash"], pa.array(forgotten.similar, pa.string()))
    # These are ids of documents in the corpus; another text of the record may have had one.
    if not is_past:
        by_id = pc.is_in(documents["id"], pa.array(forgotten.similar_ids, pa.string()))
        is_similar = pc.or_(is_similar, by_id)
    other = pc.if_else(is_similar, SIMILAR, nothing if is_past else documents["fault"])
    return pc.if_else(is_forgotten, FORGOTTEN, other)


DECIDED_SCHEMA = pa.schema(
    [
        ("row", pa.int64()),
        ("cluster", pa.string()),
        ("split", pa.string()),
        ("slice", pa.int64()),
    ]
)
"""A document that stays: its row in its part, and what was decided of it."""
CHOSEN_SCHEMA = pa.schema([("row", pa.int64())])
"""A row of the record that was chosen."""

TEMPLATE, PAST = "template", "left_the_sources"
"""Reasons for dropping documents, besides those of copies below, of `history` and `forgotten`, and
the faults of `prepare`; `PAST` is the reason of texts that are only on record."""
CONTRADICTING = "contradicting_label"
CONTRADICTS = (f"{CONTRADICTING}: ", " (kept: ", ")")
"""Around its label and that of the equal text that is kept, the reason for dropping a labeled text:
of the labels, the one that most documents with the text have is kept."""


@dataclass(frozen=True)
class DecisionRun(JobRun):
    """A run of the cleaning job, and what it decides by."""

    settings: CleanCorpusSettings
    history: History | None
    numbered_sources: Sequence[str]
    """Sources whose rows are named by their numbers."""
    forgotten: ForgottenTexts


@dataclass(frozen=True)
class DecidedDocuments:
    """What was decided over all documents."""

    stay: PartRows
    """Rows of `DECIDED_SCHEMA`, by the number of the document part."""
    left: PartRows
    """Rows of the record that no document which stays has, by the number of the record's part."""
    duplicates: PartRows
    """Rows of `DUPLICATE_SCHEMA`, numbered in the order of their ids."""
    dropped: PartRows
    """Rows of `DROPPED_SCHEMA`, numbered in the same way."""
    fates: list[dict[str, Any]]
    """`documents`, `bytes` and `repaired` by `reason` (None: stays) and `source`; those that have
    left the sources are not counted."""
    slices: list[dict[str, Any]]
    """`documents` that stay, by `slice` and `split`."""
    lengths: dict[int, int]
    """Documents that stay, by length: those of exponent e have from 2**e to less than 2**(e + 1)
    characters."""
    cluster_sizes: dict[int, int]
    """Number of clusters by their number of documents, survivor included."""
    slice: int
    """Number of this corpus in its lineage, from 1."""
    exact_copies: int
    near_copies: int
    """Verified pairs."""
    candidates: int
    """Pairs that shared a band."""
    verified: int
    """Pairs whose true similarity was worked out."""


class Decider(ABC):
    """Decides which documents of a corpus stay."""

    @abstractmethod
    def repeated_ids(self) -> list[tuple[str, int]]:
        """The first three ids that several documents of the corpus have, and how often."""

    @abstractmethod
    def sources(self) -> set[str]:
        """The sources of the corpus's documents."""

    @abstractmethod
    def texts_left(self) -> PartRows:
        """Rows of the record whose text no document without a fault has."""

    @abstractmethod
    def decide(self, past: list[PreparedPart]) -> DecidedDocuments:
        """Decide over the corpus, and the texts that have left it.

        Args:
            past: parts of `texts_left`, in that order; their numbers follow those of the corpus.
        """


EXACT, NEAR = "exact_duplicate", "near_duplicate"

DUPLICATE_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("survivor", pa.string()),
        ("cluster", pa.string()),
        ("reason", pa.string()),
        ("neighbor", pa.string()),
        ("similarity", pa.float64()),
    ]
)
"""A dropped copy: the document kept in its place, and the most similar document that was compared
with it (Jaccard similarity of the shingle sets; 1 for an exact copy)."""

DROPPED_SCHEMA = pa.schema([("id", pa.string()), ("reason", pa.string()), ("cluster", pa.string())])
"""A document that was dropped, and is neither a copy nor left out for forgotten text; the cluster
is null for one with a fault of its own. Older lists lack it."""
DROPPED_FILES, DUPLICATE_FILES = "dropped-*.parquet", "duplicates*.parquet"
LISTED_ELSEWHERE = (EXACT, NEAR, FORGOTTEN, SIMILAR)
"""Reasons of what is in other lists."""

ROWS_IN_FILE = 500_000
"""Rows of a list's file, which the task that writes it holds in memory."""


def write_list(run: JobRun, rows: parquet.PartRows, folder: str, name: str) -> None:
    """Write a list as `NAME-NNNNN.parquet`, one file per task.

    Args:
        rows: their numbers give the order, which is that of the ids.
    """
    groups = list(enumerate(rows.groups(ROWS_IN_FILE)))
    write = partial(_write_file, url=f"{folder}/{name}")
    map_tasks(run.spark, f"listing {name}", groups, write, run.report)


def _write_file(
    group: tuple[int, list[tuple[int, parquet.RowLocation, int, int]]], url: str
) -> dict[str, Any]:
    number, pieces = group
    batches = [place.read().slice(first, last - first) for _, place, first, last in pieces]
    rows = pa.Table.from_batches(batches).combine_chunks()
    parquet.write_table(f"{url}-{number:05d}.parquet", rows)
    return {}


def read_dropped(clean_corpus: str, schema: pa.Schema, column: str, values: pa.Array) -> pa.Table:
    """The rows of a list with one of some values in a column: of the list of dropped copies
    (`DUPLICATE_SCHEMA`), or of that of other dropped documents (`DROPPED_SCHEMA`)."""
    pattern = DROPPED_FILES if schema is DROPPED_SCHEMA else DUPLICATE_FILES
    tables = [schema.empty_table()]
    for url in parquet.list_files(clean_corpus, pattern):
        rows = parquet.read_table(url)
        tables.append(rows.filter(pc.is_in(rows[column], values)))
    # What older lists lack is null.
    return pa.concat_tables(tables, promote_options="permissive")
