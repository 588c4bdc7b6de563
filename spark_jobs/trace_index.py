"""Builds the indexes that answers are traced through, one task a shard.

Run as a program: `python -m spark_jobs.trace_index --spec spec.json`.
"""

import sys
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict
from pyspark.sql import SparkSession

from artifacts.cache import write_cached
from artifacts.program.entry import run_program
from artifacts.progress import Report
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import Shard, ShardFiles, text_numbers
from artifacts.shards.span_index import build_index
from spark_jobs.runtime.session import session
from spark_jobs.runtime.tasks import map_tasks


class TraceIndexSpec(BaseModel):
    """One run of this job."""

    model_config = ConfigDict(extra="forbid")

    shards: str
    """Folder of the shards."""
    stats: ShardStats
    keys: dict[str, str]
    """Maps each shard to index to its key in the cache."""
    cache: str
    """Folder of the cache that the indexes are kept in (`artifacts.cache`)."""


def run(spark: SparkSession, spec: TraceIndexSpec, report: Report = print) -> dict[str, Any]:
    """Index the shards. If a run is killed, the next one finds the indexes that it finished.

    Returns:
        `shards` and `bytes` that were written.
    """
    work = partial(_index, shards=spec.shards, stats=spec.stats, cache=spec.cache)
    records = map_tasks(spark, "indexing shards", sorted(spec.keys.items()), work, report)
    return {"shards": len(records), "bytes": sum(record["bytes"] for record in records)}


def _index(item: tuple[str, str], shards: str, stats: ShardStats, cache: str) -> dict[str, Any]:
    name, key = item
    entry = next(entry for entry in stats.shards if entry.name == name)
    shard = Shard(ShardFiles(shards), entry, stats)
    texts = text_numbers(shard.documents()["text_hash"].to_pylist())
    content = build_index(shard, texts, stats.vocab_size)
    write_cached(cache, key, content)
    return {"bytes": len(content)}


if __name__ == "__main__":
    sys.exit(run_program(TraceIndexSpec, lambda spec, report: run(session(), spec, report)))
