"""The documents in the shards: which rows hold them, and their tokens put together again."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.shards.shard_files import ShardFiles
from artifacts.shards.shard_set import ALL_SPLITS, Shard, ShardSet, ShardStats, Split


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


def list_documents(shards: ShardSet) -> pa.Table:
    """The documents of all shards, with `shard` and `number`: where `read_tokens` finds them."""
    tables = []
    for place, shard in enumerate(shards.shards):
        table = shard.documents()
        table = table.append_column("shard", pa.array([place] * len(table), pa.int64()))
        tables.append(table.append_column("number", pa.array(range(len(table)), pa.int64())))
    return pa.concat_tables(tables)


def read_tokens(shards: ShardSet, documents: pa.Table) -> list[np.ndarray]:
    """The tokens of some documents that `list_documents` listed, in their order.

    Of the shards' rows, only those are read that hold one.
    """
    found: list[np.ndarray] = [np.empty(0)] * len(documents)
    wanted = documents["shard"].to_numpy()
    for place, shard in enumerate(shards.shards):
        rows = np.flatnonzero(wanted == place)
        numbers = documents["number"].to_numpy()[rows]
        for row, tokens in zip(rows.tolist(), _put_together(shard, numbers), strict=True):
            found[row] = tokens
    return found


def read_documents(shards: ShardSet) -> Iterator[tuple[dict[str, object], np.ndarray]]:
    """Every document of a split put together again: `(its table row, its tokens)`."""
    for shard in shards.shards:
        records = shard.documents().to_pylist()
        yield from zip(records, _put_together(shard, np.arange(len(records))), strict=True)


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


def _put_together(shard: Shard, numbers: np.ndarray) -> list[np.ndarray]:
    """The tokens of documents of a shard, in the order of their numbers in it."""
    held = np.flatnonzero(np.isin(shard.segments["document"], numbers))
    held = held[np.lexsort((shard.segments["offset"][held], shard.segments["document"][held]))]
    row_of = np.searchsorted(shard.row_offsets, held, side="right") - 1
    parts: dict[int, list[np.ndarray]] = {int(number): [] for number in numbers}
    for position, row in zip(held.tolist(), row_of.tolist(), strict=True):
        start, length, document, _ = shard.segments[position]
        parts[int(document)].append(shard.tokens[row, start : start + length])
    return [np.concatenate(parts[int(number)]) for number in numbers]
