"""Rows in which some texts are masked in place: their tokens become padding.

Every row keeps its number and every other text its place in it, so a run over masked rows takes the
same rows in the same order as one over the rows as they were.
"""

from collections.abc import Collection
from functools import cached_property
from pathlib import Path

import numpy as np

from artifacts.shards.format import PackedRows, ShardStats, Split
from artifacts.shards.shard_set import ShardSet


class MaskedShardSet(ShardSet):
    """A shard set without some texts."""

    def __init__(
        self, folder: str | Path, stats: ShardStats, masked: Collection[str], *splits: Split
    ) -> None:
        """Open the splits' shards; `masked` are texts by their `text_hash`."""
        super().__init__(folder, stats, *splits)
        self._masked = frozenset(masked)

    @cached_property
    def _documents(self) -> dict[int, np.ndarray]:
        """Shard to the numbers of its masked documents, of the shards that were read."""
        return {}

    def _read_of(self, number: int, rows: np.ndarray) -> PackedRows:
        packed = super()._read_of(number, rows)
        if number not in self._documents:
            hashes = self.shard(number).documents(["text_hash"])["text_hash"].to_pylist()
            places = [place for place, text in enumerate(hashes) if text in self._masked]
            self._documents[number] = np.array(places, np.int64)
        gone = np.isin(packed.segments["document"], self._documents[number])
        if not gone.any():
            return packed
        row_of = np.repeat(np.arange(len(rows)), np.diff(packed.row_offsets))
        for row, segment in zip(row_of[gone].tolist(), packed.segments[gone], strict=True):
            first = int(segment["start"])
            packed.tokens[row, first : first + int(segment["length"])] = self.stats.end_token_id
        stay = np.concatenate([[0], np.cumsum(~gone)])
        offsets = stay[packed.row_offsets]
        return PackedRows(packed.tokens, packed.segments[~gone], offsets, packed.targets)
