"""Deciding which documents stay, as the job asks for it.

There are two deciders, and they give the same to the byte: one holds a row of every document in the
driver's memory (`in_memory`), the other leaves all of it to Spark's joins (`by_spark`).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
from pyspark.sql import SparkSession

from artifacts.progress import Report
from spark_jobs.clean.decide.documents import DocumentPart, Forgotten
from spark_jobs.clean.history import History
from spark_jobs.runtime.part_rows import PartRows
from spark_jobs.settings import CleanCorpusSettings

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

GUARDED, SPOILT, PAST = "copy_of_held_out", "trained_on_before", "left_the_sources"
"""Reasons why documents do not stay, beside those of `duplicates` and the faults of `prepare`;
the last is that of texts which are only on record."""


@dataclass(frozen=True)
class Run:
    """What every decider works with."""

    spark: SparkSession
    settings: CleanCorpusSettings
    history: History | None
    forgotten: Forgotten
    scratch: str
    """Folder for what is needed only until the job ends."""
    report: Report
    cache: str | None = None
    """Folder of what earlier runs made (`artifacts.cache`)."""


class Example(NamedTuple):
    """Where a document is."""

    id: str
    part: int
    row: int


@dataclass(frozen=True)
class Outcome:
    """What was decided over all documents."""

    stay: PartRows
    """Rows of `DECIDED_SCHEMA`, by the number of the document part."""
    left: PartRows
    """Rows of the record that are none of the documents that stay, by its part's number."""
    duplicates: PartRows
    """Rows of `duplicates.DUPLICATE_SCHEMA`, numbered in the order of their ids."""
    fates: pa.Table
    """`reason` (null: stays) and `source` to `documents`, `bytes` and `repaired`, those that have
    left the sources not counted."""
    slices: pa.Table
    """`slice` and `split` to `documents` that stay."""
    lengths: dict[int, int]
    """A power of two's exponent to the documents that stay and have so many characters or up to
    twice that."""
    cluster_sizes: dict[int, int]
    """Documents in a cluster, survivor included, to clusters."""
    examples: dict[str, list[Example]]
    """Reason to the first dropped documents by id, as many as the settings show."""
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
    """Decides over the documents of a corpus."""

    @abstractmethod
    def repeated_ids(self) -> list[tuple[str, int]]:
        """The first three ids that several documents of the corpus have, and how often."""

    @abstractmethod
    def sources(self) -> set[str]:
        """The sources that the corpus has documents of."""

    @abstractmethod
    def texts_left(self) -> PartRows:
        """Rows of the record whose texts no sound document of the corpus has."""

    @abstractmethod
    def decide(self, past: list[DocumentPart]) -> Outcome:
        """Decide over the corpus, and the texts that have left it.

        Args:
            past: parts of `texts_left`, in that order; their numbers follow those of the corpus.
        """
