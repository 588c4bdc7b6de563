"""Whether splits share duplicate clusters, without the documents of all of them in memory."""

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.shards.format import ALL_SPLITS, ShardStats, Split
from artifacts.shards.shard_set import ShardSet

CLUSTERS_AT_A_TIME = 2_000_000


def find_shared_clusters(
    folder: str, stats: ShardStats, at_a_time: int = CLUSTERS_AT_A_TIME
) -> list[str]:
    """Ids of the clusters that have documents in two splits, in order.

    The clusters of the smaller splits are held, some at a time, against those of the larger ones,
    shard by shard. Of the shards' files those alone are read that list documents.

    Args:
        folder: of the `tokenized_shards` artifact, local or in an object store.
        at_a_time: clusters held in memory.
    """
    sizes = {
        split: sum(entry.documents for entry in stats.shards if entry.split == split)
        for split in ALL_SPLITS
    }
    splits = sorted((split for split in ALL_SPLITS if sizes[split]), key=sizes.__getitem__)
    shared: set[str] = set()
    for place, small in enumerate(splits[:-1]):
        for held in _batches(_clusters(folder, stats, small), at_a_time):
            for large in splits[place + 1 :]:
                for clusters in _clusters(folder, stats, large):
                    both = pc.is_in(clusters, held)
                    shared.update(clusters.filter(both).to_pylist())
    return sorted(shared)


def _clusters(folder: str, stats: ShardStats, split: Split) -> Iterator[pa.ChunkedArray]:
    for shard in ShardSet(folder, stats, split).shards:
        yield shard.documents(["cluster"])["cluster"]


def _batches(parts: Iterator[pa.ChunkedArray], at_a_time: int) -> Iterator[pa.Array]:
    """The parts joined until they hold so many, each value once."""
    held: list[pa.ChunkedArray] = []
    for part in parts:
        held.append(part)
        if sum(map(len, held)) >= at_a_time:
            yield pc.unique(pa.chunked_array([c for one in held for c in one.chunks]))
            held = []
    if held:
        yield pc.unique(pa.chunked_array([c for one in held for c in one.chunks]))
