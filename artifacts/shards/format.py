"""Packed token rows on disk.

A shard is some files that share a name `<split>-<number>`:

- `.tokens`: little-endian u16 or u32 token ids, rows of `sequence_length` one after another.
- `.segments`: one record per stretch of a document inside a row (`SEGMENT`): where it starts in the
  row, how many tokens, which document of the shard, and which of its tokens comes first. What no
  segment covers is padding.
- `.rows`: little-endian i64, `rows + 1` offsets into the segments, so that a row's segments are
  found without reading the others'.
- `.targets`, in a corpus of examples (`artifacts.examples`): a byte for each token, 1 where it is
  learnt to be written, such as an answer, 0 where it is given.
- `.documents.parquet`: the shard's documents in order: `id`, `cluster`, `source`, `bytes` (of the
  cleaned text in UTF-8), `tokens` (start and end token included), `text_hash` (equal texts have
  equal ones, in all shards ever made) and `slice` (in which corpus of the lineage it came first).

The numbers that a reader needs beforehand are in the artifact manifest's `stats` (`ShardStats`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from artifacts.examples import Form

Split = Literal["train", "validation", "held_out", "replay"]
SPLITS: tuple[Split, ...] = ("train", "validation", "held_out")
"""Every corpus is cut into these."""
ALL_SPLITS: tuple[Split, ...] = (*SPLITS, "replay")
"""`replay` is there where the settings assign sources to it: general text that is mixed into
training against forgetting, and never judged by."""

SEGMENT = np.dtype([("start", "<i4"), ("length", "<i4"), ("document", "<i4"), ("offset", "<i4")])

DOCUMENT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("cluster", pa.string()),
        ("source", pa.string()),
        ("bytes", pa.int64()),
        ("tokens", pa.int64()),
        ("text_hash", pa.string()),
        ("slice", pa.int64()),
    ]
)


def in_split(documents: pa.Table, split: Split) -> np.ndarray:
    """Shape (documents,): whether each is in this split."""
    return np.asarray(pc.equal(documents["split"], split))


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
    form: Form = "pretraining"
    """What the corpus consists of; all tokens of plain text are learnt."""
    labels: list[str] = []
    """Of labeled texts, the classes by their numbers."""
    label_counts: list[int] = []
    """Training examples of each class."""
    target_tokens: int = 0
    """Of pairs, the most tokens of a target."""
    input_prefix: str = ""
    """Of pairs, what stands before each input."""
    chat_template: str | None = None
    """The chat template by which conversations and preferences were rendered, empty where they were
    written plainly. None of shards that do not say: it was the base model's own, if it had one."""
    erased: list[str] = []
    """Texts, by their `text_hash`, whose tokens were overwritten with the end token. Their segments
    stay, so that all rows keep their numbers and their order; no reader takes them for text."""
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
    targets: np.ndarray | None = None
    """uint8, of the tokens' shape: which are learnt; None where all are."""


def join_rows(packed: Sequence[PackedRows]) -> PackedRows:
    """Rows one after another; there is at least one group of them."""
    # Segments keep the numbers of their documents, which the caller counts over all groups.
    before = np.cumsum([0, *(len(rows.segments) for rows in packed)])
    # Without the last offset of each group, which is the first one of the next.
    offsets = [rows.row_offsets[:-1] + first for rows, first in zip(packed, before, strict=False)]
    return PackedRows(
        np.concatenate([rows.tokens for rows in packed]),
        np.concatenate([rows.segments for rows in packed]),
        np.append(np.concatenate(offsets), before[-1]),
        None
        if packed[0].targets is None
        else np.concatenate([rows.targets for rows in packed if rows.targets is not None]),
    )


def write_shard(folder: Path, name: str, rows: PackedRows, documents: pa.Table) -> None:
    """Write one shard's files into a local folder."""
    tokens = rows.tokens.astype(rows.tokens.dtype.newbyteorder("<"), copy=False)
    # Nothing is flushed here: committing an artifact flushes all of its files at once.
    tokens.tofile(folder / f"{name}.tokens")
    rows.segments.astype(SEGMENT, copy=False).tofile(folder / f"{name}.segments")
    rows.row_offsets.astype("<i8", copy=False).tofile(folder / f"{name}.rows")
    if rows.targets is not None:
        rows.targets.astype(np.uint8, copy=False).tofile(folder / f"{name}.targets")
    pq.write_table(documents.cast(DOCUMENT_SCHEMA), folder / f"{name}.documents.parquet")
