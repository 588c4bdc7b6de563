"""Every task is sent the n-grams of all reference texts: some 30 bytes for each of their words."""

import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any

from spark_jobs.decontaminate.held_out.part_ngrams import PartNGrams
from spark_jobs.decontaminate.held_out.references import Comparison, References
from spark_jobs.decontaminate.overlap import (
    NGrams,
    group_ngrams,
    join_ngrams,
    load_ngrams,
    save_ngrams,
)
from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.tasks import map_tasks


@dataclass(frozen=True)
class SentReferences(References):
    """All n-grams in one file, which a worker reads once."""

    url: str

    def of_part(self, number: int) -> NGrams:
        return load_ngrams(self.url)


def send_references(comparison: Comparison) -> References:
    """Gather the n-grams on the driver, and write them for all tasks."""
    folder = comparison.scratch
    gather = partial(_gather, ngrams=comparison.ngrams, folder=f"{folder}/{uuid.uuid4().hex}")
    spark, report = comparison.spark, comparison.report
    found = map_tasks(spark, "reading held-out texts", comparison.with_held_out, gather, report)
    urls = [record["url"] for record in found]
    urls += [comparison.evaluation] if comparison.evaluation else []
    return SentReferences(save_ngrams(folder, join_ngrams(map(load_ngrams, urls))))


def _gather(part: Part, ngrams: PartNGrams, folder: str) -> dict[str, Any]:
    return {"url": save_ngrams(folder, group_ngrams(ngrams.of_held_out(part)))}
