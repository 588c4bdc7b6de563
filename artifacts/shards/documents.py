"""The documents of shards: put together again from their rows, found in them, apart by split."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.shards.format import ALL_SPLITS, ShardStats, Split
from artifacts.shards.shard_files import ShardFiles
from artifacts.shards.shard_set import Shard, ShardSet

CLUSTERS_AT_A_TIME = 2_000_000


def list_documents(shards: ShardSet) -> pa.Table:
    """The documents of all shards, with `shard` and `number`: where `read_tokens` finds them.

    Those that were erased are left out.
    """
    tables = []
    for place, shard in enumerate(shards.shards):
        table = shard.documents()
        table = table.append_column("shard", pa.array([place] * len(table), pa.int64()))
        tables.append(table.append_column("number", pa.array(range(len(table)), pa.int64())))
    listed = pa.concat_tables(tables)
    erased = pc.is_in(listed["text_hash"], pa.array(shards.stats.erased, pa.string()))
    return listed.filter(pc.invert(erased))


def read_tokens(
    shards: ShardSet, documents: pa.Table, wanted: Literal["tokens", "targets"] = "tokens"
) -> list[np.ndarray]:
    """The tokens of some documents that `list_documents` listed, or their marks, in their order.

    Of the shards, and of their rows, only those are read that hold one.
    """
    found: list[np.ndarray] = [np.empty(0)] * len(documents)
    shard_of = documents["shard"].to_numpy()
    for place in np.unique(shard_of):
        rows = np.flatnonzero(shard_of == place)
        numbers = documents["number"].to_numpy()[rows]
        parts = tokens_of(shards.shard(int(place)), numbers, wanted)
        for row, tokens in zip(rows.tolist(), parts, strict=True):
            found[row] = tokens
    return found


def read_documents(shards: ShardSet) -> Iterator[tuple[dict[str, object], np.ndarray]]:
    """Every document of a split put together again: `(its table row, its tokens)`."""
    for shard in shards.shards:
        records = shard.documents().to_pylist()
        yield from zip(records, tokens_of(shard, np.arange(len(records))), strict=True)


def tokens_of(
    shard: Shard, numbers: np.ndarray, wanted: Literal["tokens", "targets"] = "tokens"
) -> list[np.ndarray]:
    """The tokens, or their marks, of documents of a shard, in the order of their numbers in it."""
    held = np.flatnonzero(np.isin(shard.segments["document"], numbers))
    held = held[np.lexsort((shard.segments["offset"][held], shard.segments["document"][held]))]
    row_of = np.searchsorted(shard.row_offsets, held, side="right") - 1
    values = getattr(shard, wanted)
    parts: dict[int, list[np.ndarray]] = {int(number): [] for number in numbers}
    for position, row in zip(held.tolist(), row_of.tolist(), strict=True):
        start, length, document, _ = shard.segments[position]
        parts[int(document)].append(values[row, start : start + length])
    return [np.concatenate(parts[int(number)]) for number in numbers]


@dataclass(frozen=True)
class Occurrence:
    """Rows of one shard that hold a document."""

    document: str
    source: str
    split: Split
    shard: str
    rows: list[int]
    """Counted within the shard."""


def find_occurrences(
    shards: Path, stats: ShardStats, documents: Collection[str]
) -> list[Occurrence]:
    """Every row that holds one of the documents, training rows first.

    Args:
        shards: folder of the `tokenized_shards` artifact.
        stats: that artifact's stats.
        documents: ids.
    """
    wanted = pa.array(sorted(documents), pa.string())
    return [
        occurrence
        for entry in sorted(stats.shards, key=lambda e: (ALL_SPLITS.index(e.split), e.name))
        if entry.rows
        for occurrence in _find_in(Shard(ShardFiles(shards), entry, stats), wanted)
    ]


def _find_in(shard: Shard, wanted: pa.Array) -> list[Occurrence]:
    listed = shard.documents()
    numbers = np.flatnonzero(np.asarray(pc.is_in(listed["id"], wanted)))
    occurrences = []
    for number in numbers:
        segments = np.flatnonzero(shard.segments["document"] == number)
        rows = np.unique(np.searchsorted(shard.row_offsets, segments, side="right") - 1)
        document, source = listed["id"][number].as_py(), listed["source"][number].as_py()
        entry = shard.entry
        occurrences.append(Occurrence(document, source, entry.split, entry.name, rows.tolist()))
    return occurrences


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
