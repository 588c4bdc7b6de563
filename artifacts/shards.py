"""Packed token rows on disk.

A shard is four files that share a name `<split>-<number>`:

- `.tokens`: little-endian u16 or u32 token ids, rows of `sequence_length` one after another.
- `.segments`: one record per stretch of a document inside a row (`SEGMENT`): where it starts in the
  row, how many tokens, which document of the shard, and which of its tokens comes first. What no
  segment covers is padding.
- `.rows`: little-endian i64, `rows + 1` offsets into the segments, so that a row's segments are
  found without reading the others'.
- `.documents.parquet`: the shard's documents in order: `id`, `cluster`, `source`, `bytes` (of the
  cleaned text in UTF-8) and `tokens` (start and end token included).

The numbers that a reader needs beforehand are in the artifact manifest's `stats` (`ShardStats`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from artifacts.errors import DamagedArtifact, UserError

Split = Literal["train", "validation", "held_out"]
SPLITS: tuple[Split, ...] = ("train", "validation", "held_out")

SEGMENT = np.dtype([("start", "<i4"), ("length", "<i4"), ("document", "<i4"), ("offset", "<i4")])

DOCUMENT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("cluster", pa.string()),
        ("source", pa.string()),
        ("bytes", pa.int64()),
        ("tokens", pa.int64()),
    ]
)


class ShardEntry(BaseModel):
    """One shard, as the manifest lists it."""

    model_config = ConfigDict(extra="forbid")

    name: str
    split: Split
    rows: int
    tokens: int
    """Tokens of documents, padding excluded."""
    documents: int


class ShardStats(BaseModel):
    """The part of a `tokenized_shards` manifest's `stats` that a reader needs."""

    model_config = ConfigDict(extra="allow")

    sequence_length: int
    dtype: Literal["uint16", "uint32"]
    vocab_size: int
    tokenizer_sha256: str
    start_token_id: int | None
    end_token_id: int
    shards: list[ShardEntry]


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The narrowest token type that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


@dataclass(frozen=True)
class PackedRows:
    """Rows in memory, ready to be written as one shard."""

    tokens: np.ndarray
    """Shape (rows, sequence_length)."""
    segments: np.ndarray
    """`SEGMENT` records in row order."""
    row_offsets: np.ndarray
    """Shape (rows + 1,)."""


def write_shard(folder: Path, name: str, rows: PackedRows, documents: pa.Table) -> None:
    """Write one shard's four files into a local folder."""
    rows.tokens.astype(rows.tokens.dtype.newbyteorder("<")).tofile(folder / f"{name}.tokens")
    rows.segments.astype(SEGMENT).tofile(folder / f"{name}.segments")
    rows.row_offsets.astype("<i8").tofile(folder / f"{name}.rows")
    pq.write_table(documents.cast(DOCUMENT_SCHEMA), folder / f"{name}.documents.parquet")


class Shard:
    """One shard's rows, memory-mapped: opening it costs the same at any size."""

    def __init__(self, folder: Path, entry: ShardEntry, stats: ShardStats) -> None:
        self.entry = entry
        self._documents_path = folder / f"{entry.name}.documents.parquet"
        dtype = np.dtype(stats.dtype).newbyteorder("<")
        expected = entry.rows * stats.sequence_length
        self.tokens = _map(folder / f"{entry.name}.tokens", dtype, expected).reshape(
            entry.rows, stats.sequence_length
        )
        self.row_offsets = _map(folder / f"{entry.name}.rows", np.dtype("<i8"), entry.rows + 1)
        self.segments = _map(folder / f"{entry.name}.segments", SEGMENT, int(self.row_offsets[-1]))

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """`(tokens of shape (sequence_length,), SEGMENT records)` of one row."""
        first, last = self.row_offsets[index], self.row_offsets[index + 1]
        return self.tokens[index], self.segments[first:last]

    def documents(self) -> pa.Table:
        """The shard's documents, in the order that segments count them."""
        return pq.read_table(self._documents_path)


class ShardSet(Sequence[tuple[np.ndarray, np.ndarray]]):
    """All rows of one split, addressed by one global index."""

    def __init__(self, folder: Path, stats: ShardStats, split: Split) -> None:
        self.stats = stats
        self.split = split
        entries = sorted((e for e in stats.shards if e.split == split), key=lambda e: e.name)
        self.shards = [Shard(folder, entry, stats) for entry in entries if entry.rows]
        self._ends = np.cumsum([shard.entry.rows for shard in self.shards])
        if not self.shards:
            raise UserError(
                f"The shards in {folder} hold no {split} rows. Give the corpus more text, or a "
                f"larger `tokenized_shards.split.{split}`."
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._ends, index, side="right"))
        shard = self.shards[number]
        return shard.row(index - int(self._ends[number]) + shard.entry.rows)


def read_documents(shards: ShardSet) -> Iterator[tuple[dict[str, object], np.ndarray]]:
    """Every document of a split put together again: `(its table row, its tokens)`."""
    for shard in shards.shards:
        order = np.lexsort((shard.segments["offset"], shard.segments["document"]))
        row_of = np.repeat(np.arange(shard.entry.rows), np.diff(shard.row_offsets))
        parts: dict[int, list[np.ndarray]] = {}
        for position in order:
            start, length, document, _ = shard.segments[position]
            tokens = shard.tokens[row_of[position], start : start + length]
            parts.setdefault(int(document), []).append(tokens)
        for number, record in enumerate(shard.documents().to_pylist()):
            yield record, np.concatenate(parts[number])


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if not path.exists():
        raise DamagedArtifact(f"{path} is absent, though its manifest lists it.")
    if path.stat().st_size != count * dtype.itemsize:
        raise DamagedArtifact(
            f"{path} has {path.stat().st_size} bytes where its manifest means "
            f"{count * dtype.itemsize}. Delete its folder and materialize `tokenized_shards` again."
        )
    if count == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
