"""Where documents lie in the shards."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.shards.format import ALL_SPLITS, ShardStats, Split
from artifacts.shards.shard_files import ShardFiles
from artifacts.shards.shard_set import Shard


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
