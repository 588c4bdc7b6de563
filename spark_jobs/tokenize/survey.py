"""A first look at the clean corpus: sizes, and a sample for the parity check."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc
from pyspark.sql import SparkSession

from artifacts.progress import Report
from artifacts.shards.format import Split, token_dtype
from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.tasks import map_tasks
from spark_jobs.settings import TokenizedShardsSettings

SAMPLE_PARTS = 4
SAMPLE_CHARACTERS = 1_000_000

BYTES_PER_TOKEN = 4
"""Rough length of a token in text, which only decides into how many shards a split is cut."""


@dataclass(frozen=True)
class Survey:
    """What is known of the clean corpus before the long work."""

    documents: Counter[Split]
    bytes: Counter[Split]
    sources: set[str]
    source_bytes: Counter[str]
    """Bytes of training text by source."""
    source_documents: Counter[str]
    """Training documents by source."""
    with_held_out: list[Part]
    """Parts with documents that are held out."""
    sample: list[str]
    """Texts, the same ones for the same corpus."""


def survey_parts(
    spark: SparkSession, parts: list[Part], settings: TokenizedShardsSettings, report: Report
) -> Survey:
    """Read the corpus's small columns part by part, and a few of its texts."""
    surveys = map_tasks(spark, "surveying", parts, _survey_part, report)
    documents: Counter[Split] = Counter()
    sizes: Counter[Split] = Counter()
    source_bytes: Counter[str] = Counter()
    source_documents: Counter[str] = Counter()
    groups = [group for survey in surveys for group in survey["groups"]]
    for group in groups:
        documents[group["split"]] += group["documents"]
        sizes[group["split"]] += group["bytes"]
        if group["split"] == "train":
            source_bytes[group["source"]] += group["bytes"]
            source_documents[group["source"]] += group["documents"]
    return Survey(
        documents=documents,
        bytes=sizes,
        sources={group["source"] for group in groups},
        source_bytes=source_bytes,
        source_documents=source_documents,
        with_held_out=[
            part
            for part, survey in zip(parts, surveys, strict=True)
            if any(group["split"] == "held_out" for group in survey["groups"])
        ],
        sample=_sample(parts, [survey["smallest_cluster"] for survey in surveys], settings),
    )


def _survey_part(part: Part) -> dict[str, Any]:
    """Of one part: `groups`, of each `split` and `source` the `documents` and their `bytes`; and
    its `smallest_cluster`."""
    table = part.read(["cluster", "source", "bytes", "split"])
    sums = table.group_by(["split", "source"]).aggregate([("bytes", "sum"), ("bytes", "count")])
    names = {"bytes_sum": "bytes", "bytes_count": "documents"}
    groups = sums.rename_columns([names.get(name, name) for name in sums.column_names])
    return {"groups": groups.to_pylist(), "smallest_cluster": pc.min(table["cluster"]).as_py()}


def _sample(parts: list[Part], smallest: list[str], settings: TokenizedShardsSettings) -> list[str]:
    """Texts from a few parts, both chosen by cluster ids, which are uniform hashes."""
    count = settings.parity_sample
    chosen = sorted(range(len(parts)), key=smallest.__getitem__)[:SAMPLE_PARTS]
    sample: list[str] = []
    for number in chosen:
        table = parts[number].read(["cluster", "text"]).sort_by("cluster")
        sample += table["text"][: -(-count // len(chosen))].to_pylist()
    sample = sample[:count]
    while len(sample) > 1 and sum(map(len, sample)) > SAMPLE_CHARACTERS:
        sample.pop()
    return sample


def count_shards(survey: Survey, vocab_size: int, shard_bytes: int) -> dict[Split, int]:
    """Shards of each split, from the size of its text."""
    token_bytes = 2 if token_dtype(vocab_size) == "uint16" else 4
    return {
        split: max(1, round(size / BYTES_PER_TOKEN * token_bytes / shard_bytes))
        for split, size in survey.bytes.items()
    }
