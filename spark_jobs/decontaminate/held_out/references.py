"""The n-grams of reference texts, as a task that compares a part of the corpus asks for them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from pyspark.sql import SparkSession

from artifacts.progress import Report
from spark_jobs.decontaminate.held_out.part_ngrams import PartNGrams
from spark_jobs.decontaminate.overlap import NGrams
from spark_jobs.runtime.parquet import Part


class References(ABC):
    """The n-grams of all held-out and evaluation texts."""

    @abstractmethod
    def of_part(self, number: int) -> NGrams:
        """Those that a part's training text holds, of each text that holds them.

        There may be others among them, which change no overlap.
        """


@dataclass(frozen=True)
class Comparison:
    """What is compared."""

    spark: SparkSession
    parts: list[Part]
    """Of the clean corpus; their numbers are those that `References` is asked by."""
    with_held_out: list[Part]
    """Those with held-out documents."""
    evaluation: str | None
    """URL of the n-grams of the evaluation texts (`overlap.save_ngrams`)."""
    ngrams: PartNGrams
    scratch: str
    """Folder for what is needed only until the job ends."""
    report: Report
