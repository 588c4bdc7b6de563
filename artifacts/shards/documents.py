"""Documents put together again from the rows that they were cut into."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.shards.shard_set import Shard, ShardSet


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
