"""Reads packed token rows; `artifacts.shards.format` says how they lie on disk."""

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.errors import UserError
from artifacts.numbers.arrays import ends_of, spans
from artifacts.shards.format import SEGMENT, PackedRows, ShardEntry, ShardStats, Split
from artifacts.shards.shard_files import ShardFiles


class Shard:
    """One shard's rows, memory-mapped. A file is fetched when first asked for, so who needs no
    tokens moves none."""

    def __init__(self, files: ShardFiles, entry: ShardEntry, stats: ShardStats) -> None:
        self.entry = entry
        self._files, self._stats = files, stats

    @cached_property
    def tokens(self) -> np.ndarray:
        """Shape (rows, sequence_length)."""
        dtype = np.dtype(self._stats.dtype).newbyteorder("<")
        shape = self.entry.rows, self._stats.sequence_length
        return self._map("tokens", dtype, shape[0] * shape[1]).reshape(shape)

    @cached_property
    def targets(self) -> np.ndarray | None:
        """uint8, of the tokens' shape: which are learnt; None where all are."""
        if self._stats.form == "pretraining":
            return None
        marks = self._map("targets", np.dtype(np.uint8), self.tokens.size)
        return marks.reshape(self.tokens.shape)

    @cached_property
    def row_offsets(self) -> np.ndarray:
        """Shape (rows + 1,): where each row's segments begin."""
        return self._map("rows", np.dtype("<i8"), self.entry.rows + 1)

    @cached_property
    def segments(self) -> np.ndarray:
        """`SEGMENT` records in row order."""
        return self._map("segments", SEGMENT, int(self.row_offsets[-1]))

    def documents(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The shard's documents, in the order that segments count them; by default whole."""
        path = self._files.fetch(f"{self.entry.name}.documents.parquet")
        # Not `pq.read_table`, whose datasets import pandas: half a second of every training.
        return pq.ParquetFile(path).read(columns)

    def _map(self, suffix: str, dtype: np.dtype, count: int) -> np.ndarray:
        name = f"{self.entry.name}.{suffix}"
        self._files.check(name, count * dtype.itemsize)
        if count == 0:
            return np.empty(0, dtype)
        # A plain view: numpy's memmap class does work of its own at every access.
        return np.asarray(np.memmap(self._files.fetch(name), dtype, mode="r", shape=(count,)))


class ShardSet(Sequence[tuple[np.ndarray, np.ndarray]]):
    """All rows of one split, or of several one after another, addressed by one global index.

    Opening it takes one listing of the folder; a shard is opened when one of its rows is read.
    """

    def __init__(
        self, folder: str | Path, stats: ShardStats, *splits: Split, cache: Path | None = None
    ) -> None:
        """Find the splits' shards.

        Args:
            folder: local, or the URL of a folder in an object store.
            cache: see `artifacts.shards.shard_files`.

        Raises:
            UserError: a split has no rows.
            DamagedArtifact: a file is absent or of the wrong size.
        """
        self.stats = stats
        self._files = ShardFiles(folder, cache)
        self.entries: list[ShardEntry] = []
        for split in splits:
            entries = [entry for entry in stats.shards if entry.split == split and entry.rows]
            if not entries:
                raise UserError(_describe_empty(folder, split))
            self.entries += sorted(entries, key=lambda entry: entry.name)
        row_bytes = stats.sequence_length * np.dtype(stats.dtype).itemsize
        for entry in self.entries:
            self._files.check(f"{entry.name}.tokens", entry.rows * row_bytes)
            self._files.check(f"{entry.name}.rows", 8 * (entry.rows + 1))
            self._files.check(f"{entry.name}.segments")
        self._ends = np.cumsum([entry.rows for entry in self.entries])
        self._opened: dict[int, Shard] = {}

    @property
    def shards(self) -> Iterator[Shard]:
        """Every shard, in the order of the rows."""
        return map(self.shard, range(len(self.entries)))

    @property
    def ends(self) -> np.ndarray:
        """Shape (shards,): the first row past each shard."""
        return self._ends

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[override]
        """`(tokens of shape (sequence_length,), SEGMENT records)` of one row."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        row = self.read(np.array([index]))
        return row.tokens[0], row.segments

    def locate(self, index: int) -> tuple[ShardEntry, int]:
        """The shard that a row is in, and the row's number there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        entry = self.entries[number]
        return entry, index - int(self._ends[number]) + entry.rows

    def read(self, rows: np.ndarray) -> PackedRows:
        """Copies of some rows, in the order asked for."""
        numbers = np.searchsorted(self._ends, rows, side="right")
        touched = np.unique(numbers)
        if len(touched) == 1:
            return self._read_of(int(touched[0]), rows)
        tokens = np.empty((len(rows), self.stats.sequence_length), self.stats.dtype)
        has_targets = self.stats.form != "pretraining"
        targets = np.empty(tokens.shape, np.uint8) if has_targets else None
        counts = np.empty(len(rows), np.int64)
        parts = []
        for number in touched.tolist():
            places = np.flatnonzero(numbers == number)
            part = self._read_of(number, rows[places])
            tokens[places], counts[places] = part.tokens, np.diff(part.row_offsets)
            if targets is not None and part.targets is not None:
                targets[places] = part.targets
            parts.append((places, part.segments))
        offsets = ends_of(counts)
        segments = np.empty(offsets[-1], SEGMENT)
        for places, of_part in parts:
            segments[spans(offsets[places], counts[places])] = of_part
        return PackedRows(tokens, segments, offsets, targets)

    def _read_of(self, number: int, rows: np.ndarray) -> PackedRows:
        """Rows that are all in one shard."""
        shard = self.shard(number)
        local = rows - (int(self._ends[number]) - shard.entry.rows)
        first = shard.row_offsets[local]
        counts = shard.row_offsets[local + 1] - first
        return PackedRows(
            shard.tokens[local],
            shard.segments[spans(first, counts)],
            ends_of(counts),
            None if shard.targets is None else shard.targets[local],
        )

    def shard(self, number: int) -> Shard:
        """One shard, by its place in `entries`."""
        if number not in self._opened:
            self._opened[number] = Shard(self._files, self.entries[number], self.stats)
        return self._opened[number]


def _describe_empty(folder: str | Path, split: Split) -> str:
    if split == "replay":
        return (
            f"The shards in {folder} hold no rows to replay. Assign a source of general text to "
            "`replay` in `clean_corpus.split.sources`, or set `checkpoint.replay_share` to 0."
        )
    share = "" if split == "train" else f", or a larger `clean_corpus.split.{split}`"
    return f"The shards in {folder} hold no {split} rows. Give the corpus more text{share}."


class MaskedShardSet(ShardSet):
    """A shard set in which some texts are masked in place: their tokens become padding.

    Every row keeps its number and every other text its place in it, so a run over masked rows takes
    the same rows in the same order as one over the rows as they were.
    """

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
