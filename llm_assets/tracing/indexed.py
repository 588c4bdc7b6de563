"""The shards that a version was trained on, opened through their indexes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import pyarrow as pa

from artifacts.cache import cache_key, cached_file, read_cached, write_cached
from artifacts.errors import DamagedArtifact
from artifacts.progress import Report
from artifacts.shards import span_index
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import Shard, ShardFiles
from artifacts.shards.span_index import SpanIndex
from artifacts.store.store import Artifact, Store

_TRAINED_SPLITS = ("train", "replay")


@dataclass(frozen=True)
class IndexedShard:
    """A shard and its index."""

    shard: Shard
    index: SpanIndex
    content: str
    """The same for shards of the same content, of whichever artifact."""
    records: frozenset[str] = frozenset()
    """URLs of what the runs that took rows of it were trained on (`recipes.data.records`)."""

    @cached_property
    def documents(self) -> pa.Table:
        """`id` and `source` of the shard's documents, read once."""
        return self.shard.documents(["id", "source"])


def open_indexed(
    store: Store, artifact: Artifact, records: frozenset[str], report: Report
) -> list[IndexedShard]:
    """The shards of a `tokenized_shards` artifact that runs, of these records, may have trained on.

    Indexes that are missing are built first, by Spark on this machine, and kept under the shards'
    content: what an earlier corpus had already is not indexed again.
    """
    stats = ShardStats.model_validate(artifact.stats)
    keys = index_keys(artifact, stats)
    files = ShardFiles(artifact.path)
    entries = {entry.name: entry for entry in stats.shards}
    found = dict(_opened(store, keys))
    missing = {name: key for name, key in keys.items() if name not in found}
    if missing:
        _build(store, artifact, stats, missing, report)
        found |= dict(_opened(store, missing))
    return [
        IndexedShard(Shard(files, entries[name], stats), found[name], keys[name], records)
        for name in sorted(found)
    ]


def index_keys(artifact: Artifact, stats: ShardStats) -> dict[str, str]:
    """Shard to the cache's key of its index, by the content of its files."""
    contents = {entry.path: entry.sha256 or entry.crc32c for entry in artifact.manifest.files}
    return {
        entry.name: cache_key(
            "span index",
            span_index.__name__,
            ["numpy", "scipy"],
            vocab_size=stats.vocab_size,
            sequence_length=stats.sequence_length,
            files=[contents[f"{entry.name}.{end}"] for end in ("tokens", "segments", "rows")],
            documents=contents[f"{entry.name}.documents.parquet"],
        )
        for entry in stats.shards
        if entry.split in _TRAINED_SPLITS and entry.rows
    }


def _opened(store: Store, keys: dict[str, str]) -> Iterator[tuple[str, SpanIndex]]:
    for name, key in keys.items():
        file = cached_file(store.machine_cache, key)
        if file is None and not store.is_local:
            content = read_cached(store.cache, key)
            if content is not None:
                write_cached(store.machine_cache, key, content)
                file = cached_file(store.machine_cache, key)
        if file is None:
            continue
        try:
            yield name, SpanIndex(*file)
        except DamagedArtifact:
            file[0].unlink(missing_ok=True)


def _build(
    store: Store, artifact: Artifact, stats: ShardStats, keys: dict[str, str], report: Report
) -> None:
    from spark_jobs import trace_index
    from spark_jobs.runtime.session import end_local_session, local_session

    report(f"Indexing {len(keys):,} shards; this is done once for a shard.")
    spec = trace_index.TraceIndexSpec(
        shards=str(artifact.path), stats=stats, keys=keys, cache=store.machine_cache
    )
    trace_index.run(local_session(), spec, report)
    end_local_session()
