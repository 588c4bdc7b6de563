"""A first look at the clean corpus: sizes of the splits, and a sample for the parity check."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from artifacts.shards import SPLITS, Split
from spark_jobs.parquet import Part
from spark_jobs.progress import Report
from spark_jobs.settings import SplitSettings, TokenizedShardsSettings
from spark_jobs.split import split_of, threshold
from spark_jobs.tasks import map_tasks

SAMPLE_CHARACTERS = 2_000_000
_SPARE = 3
"""Tasks offer this many times the wanted sample, so that chance leaves enough."""


@dataclass(frozen=True)
class Survey:
    """What is known of the clean corpus before the long work."""

    documents: dict[Split, int]
    bytes: dict[Split, int]
    sample: list[str]
    """Texts, the same ones for the same corpus."""


def survey_parts(
    spark: SparkSession, parts: list[Part], settings: TokenizedShardsSettings, report: Report
) -> Survey:
    """Read the corpus's small columns and a few of its texts."""
    documents = sum(part.rows for part in parts)
    # Cluster ids are uniform hashes, so those below a bound are a fixed random sample.
    bound = threshold(min(1.0, _SPARE * settings.parity_sample / max(1, documents)))
    work = partial(_survey_part, split=settings.split, bound=bound)
    records = map_tasks(spark, "surveying the clean corpus", parts, work, report)
    candidates = sorted(tuple(item) for record in records for item in record["sample"])
    sample: list[str] = []
    for _, _, text in candidates[: settings.parity_sample]:
        sample.append(text)
        if sum(map(len, sample)) > SAMPLE_CHARACTERS:
            break
    return Survey(
        documents={split: sum(record[split][0] for record in records) for split in SPLITS},
        bytes={split: sum(record[split][1] for record in records) for split in SPLITS},
        sample=sample,
    )


def _survey_part(part: Part, split: SplitSettings, bound: str) -> dict[str, Any]:
    table = part.read(["id", "cluster", "bytes"])
    record: dict[str, Any] = {name: [0, 0] for name in SPLITS}
    chosen = []
    for row, (cluster, size) in enumerate(
        zip(table["cluster"].to_pylist(), table["bytes"].to_pylist(), strict=True)
    ):
        counts = record[split_of(cluster, split)]
        counts[0] += 1
        counts[1] += size
        if cluster < bound:
            chosen.append(row)
    sample = table.append_column("text", part.read(["text"])["text"]).take(
        pa.array(chosen, pa.int64())
    )
    record["sample"] = [(r["cluster"], r["id"], r["text"]) for r in sample.to_pylist()]
    return record
