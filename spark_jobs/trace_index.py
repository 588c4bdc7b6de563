"""Builds the indexes that answers are traced through, one task a shard."""

from functools import partial
from typing import Any

from pyspark.sql import SparkSession

from artifacts.cache import write_cached
from artifacts.progress import Report
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import Shard, ShardFiles, text_numbers
from artifacts.shards.span_index import build_index
from spark_jobs.runtime.tasks import map_tasks


def build_indexes(
    spark: SparkSession,
    shards: ShardFiles,
    stats: ShardStats,
    keys: dict[str, str],
    cache: str,
    report: Report,
) -> None:
    """Index shards. If a run is killed, the next one finds the indexes that it finished.

    Args:
        keys: maps each shard to index to its key in the cache.
        cache: folder of the cache that the indexes are kept in (`artifacts.cache`).
    """
    work = partial(_index, shards=shards, stats=stats, cache=cache)
    map_tasks(spark, "indexing shards", sorted(keys.items()), work, report)


def _index(
    item: tuple[str, str], shards: ShardFiles, stats: ShardStats, cache: str
) -> dict[str, Any]:
    name, key = item
    entry = next(entry for entry in stats.shards if entry.name == name)
    shard = Shard(shards, entry, stats)
    texts = text_numbers(shard.documents()["text_hash"].to_pylist())
    content = build_index(shard, texts, stats.vocab_size)
    write_cached(cache, key, content)
    return {"bytes": len(content)}
