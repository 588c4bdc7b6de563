"""Which decider a corpus gets, by its size alone."""

from spark_jobs.clean.decide.by_spark.decider import SparkDecider
from spark_jobs.clean.decide.decider import Decider, Run
from spark_jobs.clean.decide.documents import DocumentPart
from spark_jobs.clean.decide.in_memory.decider import InMemoryDecider
from spark_jobs.runtime.parquet import Part


def choose_decider(
    run: Run, parts: list[DocumentPart], raw: list[Part], documents_in_memory: int
) -> Decider:
    """The decider for so many documents as a raw corpus and the record of the earlier ones have.

    Both give the same to the byte, so the bound is no part of what the clean corpus is.
    """
    documents = sum(part.rows for part in raw)
    if run.history:
        documents += sum(part.rows for part in run.history.parts)
    if documents <= documents_in_memory:
        return InMemoryDecider(run, parts)
    return SparkDecider(run, parts, documents)
