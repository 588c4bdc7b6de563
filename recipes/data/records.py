"""What models were trained on: `seen.parquet` of a lineage, `trained.parquet` of a run.

A document is known by the hash of its text, a stretch by its tokens' places in it, so the record
holds however later shards are cut and packed. It goes with every checkpoint, as `seen.parquet`.

`trained.parquet` says of one run which stretch of which text was in which step, and in which row.
Steps whose gradient was not used, and those after the weights that were exported, taught the model
nothing and are in neither. Both hold when the shards are gone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.numbers import run_starts, spans
from artifacts.shards.shard_set import Shard, ShardSet, text_numbers
from artifacts.storage import files

SEEN_NAME = "seen.parquet"
_PLACES = np.int64(2**32)
"""More tokens than any document has: two documents' coordinates lie this far apart."""


@dataclass(frozen=True)
class LineageRecord:
    """Stretches that do not overlap, ordered by document and start; arrays of one length."""

    texts: np.ndarray
    """uint64: a hash of the document's text."""
    starts: np.ndarray
    ends: np.ndarray
    """int64: first token, and the first one past the last."""
    times: np.ndarray
    """int64: how often it was trained on."""

    @classmethod
    def none(cls) -> "LineageRecord":
        """The record of a model that nothing is known of."""
        return cls(np.empty(0, np.uint64), *(np.empty(0, np.int64) for _ in range(3)))

    @classmethod
    def read(cls, url: str | None) -> "LineageRecord":
        """A record that was written; an empty one where there is none."""
        if url is None:
            return cls.none()
        with files.open_file(url) as file:
            table = pq.read_table(file)
        return cls(*(column.to_numpy() for column in table.columns))

    def write(self, path: str) -> None:
        """Write the record as Parquet."""
        columns = {"text": self.texts, "start": self.starts, "end": self.ends, "times": self.times}
        pq.write_table(pa.table(columns), path, compression="zstd")

    @cached_property
    def _known(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct texts, and where each stretch begins on one line of all texts, `_PLACES`
        apart."""
        begins = run_starts(self.texts)
        return self.texts[begins], (np.cumsum(begins) - 1) * _PLACES + self.starts

    def tokens(self, texts: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """How many tokens of each given stretch were seen: int64, of the stretches' shape."""
        if not len(self.texts):
            return np.zeros(len(texts), np.int64)
        distinct, firsts = self._known
        places = np.minimum(np.searchsorted(distinct, texts), len(distinct) - 1)
        lengths = self.ends - self.starts
        before = np.cumsum(lengths) - lengths

        # Counts all that was seen before a place on that line, so a stretch is a difference of two.
        def seen_below(tokens: np.ndarray) -> np.ndarray:
            at = places * _PLACES + tokens
            stretch = np.maximum(np.searchsorted(firsts, at, side="right") - 1, 0)
            return before[stretch] + np.clip(at - firsts[stretch], 0, lengths[stretch])

        return np.where(distinct[places] == texts, seen_below(ends) - seen_below(starts), 0)

    def without(self, texts: Sequence[str]) -> "LineageRecord":
        """The record without some texts, by their `text_hash`."""
        stays = ~np.isin(self.texts, text_numbers(texts))
        return LineageRecord(
            self.texts[stays], self.starts[stays], self.ends[stays], self.times[stays]
        )

    def plus(self, texts: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> "LineageRecord":
        """The record after each of these stretches was seen once more; they may overlap."""
        # One sweep over all bounds: a stretch adds its times where it begins, and takes them off
        # where it ends.
        ones = np.ones(len(texts), np.int64)
        of = np.concatenate([self.texts, texts, self.texts, texts])
        at = np.concatenate([self.starts, starts, self.ends, ends])
        change = np.concatenate([self.times, ones, -self.times, -ones])
        order = np.lexsort((at, of))
        of, at, times = of[order], at[order], np.cumsum(change[order])
        # Between two neighboring bounds the count stays the same; past a document's last it is 0.
        stays = np.flatnonzero((times[:-1] > 0) & (at[1:] > at[:-1]))
        of, first, last, times = of[stays], at[stays], at[stays + 1], times[stays]
        # Neighbors that touch and were seen equally often become one stretch.
        begins = run_starts(of) | run_starts(times)
        begins[1:] |= first[1:] != last[:-1]
        # Cut to as many as `begins`: `append` gives one even where there is no stretch.
        ends_at = np.append(begins[1:], True)[: len(begins)]
        return LineageRecord(of[begins], first[begins], last[ends_at], times[begins])


class RowCounts(NamedTuple):
    """What is known of the rows of a split; arrays of the shape (rows,)."""

    tokens: np.ndarray
    """Padding excluded."""
    seen: np.ndarray
    """How many of them the lineage has seen."""
    slices: np.ndarray
    """When its documents came, the latest of them."""


def look_up(shards: ShardSet, seen: LineageRecord, rank: int = 0, count: int = 1) -> RowCounts:
    """How much of each row was seen.

    Of several workers each reads its part of the shards, and has zeros for all other rows; their
    sum is the whole.
    """
    counts = np.zeros((3, len(shards)), np.int64)
    for number in range(rank, len(shards.entries), count):
        shard = shards.shard(number)
        size, end = shard.entry.rows, int(shards.ends[number])
        rows = np.repeat(np.arange(size), np.diff(shard.row_offsets))
        # Views of the counts, which the following lines fill.
        tokens, times, slices = counts[:, end - size : end]
        tokens += np.bincount(rows, shard.segments["length"], size).astype(np.int64)
        of_documents = shard.documents(["slice"])["slice"].to_numpy()
        np.maximum.at(slices, rows, of_documents[shard.segments["document"]])
        if len(seen.texts):
            seen_tokens = seen.tokens(*stretches_of(shard, np.arange(size)))
            times += np.bincount(rows, seen_tokens, size).astype(np.int64)
    return RowCounts(*counts)


def add_rows(seen: LineageRecord, shards: ShardSet, rows: np.ndarray) -> LineageRecord:
    """The record after these rows were trained on, each as often as it is named."""
    return seen.plus(*_lessons(shards, rows)[:3])


def stretches_of(shard: Shard, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(texts, starts, ends)` of all segments of some of a shard's rows, in their order."""
    first = np.asarray(shard.row_offsets[rows])
    counts = np.asarray(shard.row_offsets[rows + 1]) - first
    segments = shard.segments[spans(first, counts)]
    texts = text_numbers(shard.documents(["text_hash"])["text_hash"].to_pylist())
    starts = segments["offset"].astype(np.int64)
    return texts[segments["document"]], starts, starts + segments["length"]


def record_seen(
    shards: ShardSet,
    known: RowCounts,
    before: LineageRecord,
    rows: np.ndarray,
    path: str,
    masked: Sequence[str] = (),
) -> tuple[float, int]:
    """Add a run's rows to what its lineage has seen, and write the new record.

    The rows are those that taught the exported weights; those past the train split are replayed
    ones, which no record holds. No model of the lineage was trained on masked texts (`text_hash`)
    after all.

    Returns the share of the split's tokens that the lineage has now seen, each text counted once
    however many rows it stands in, and how many of these rows' tokens it had seen when training
    began.
    """
    rows = rows[rows < len(shards)]
    after = add_rows(before, shards, rows).without(masked)
    after.write(path)
    columns = []
    # Shard by shard, since the hashes of a large corpus as text would fill the memory.
    for shard in shards.shards:
        documents = shard.documents(["text_hash", "tokens"])
        hashes, tokens = documents["text_hash"].to_pylist(), documents["tokens"].to_numpy()
        columns.append((text_numbers(hashes), tokens))
    every, lengths = map(np.concatenate, zip(*columns, strict=True))
    texts, places = np.unique(every, return_index=True)
    # What is masked or forgotten is there no more to be read.
    is_there = ~np.isin(texts, text_numbers([*masked, *shards.stats.erased]))
    ends = np.where(is_there, lengths[places], 0)
    seen = after.tokens(texts, np.zeros_like(ends), ends)
    return float(seen.sum() / max(1, ends.sum())), int(known.seen[rows].sum())


TRAINED_NAME = "trained.parquet"
TRAINED_SCHEMA = pa.schema(
    [
        ("text", pa.uint64()),
        ("start", pa.int32()),
        ("end", pa.int32()),
        ("step", pa.int32()),
        ("row", pa.int64()),
    ]
)
"""Ordered by `text`, then `step`: the stretch's first token in its text, the first one past it, the
optimizer step counted from 1, and the row's number among those of the run, replayed rows last."""
_RECORDS_IN_GROUP = 8_192
"""Small, since looking up a text reads every group that may hold it."""


def record_trained(
    shards: ShardSet,
    rows: np.ndarray,
    steps: np.ndarray,
    path: str,
    masked: Sequence[str] = (),
) -> None:
    """Write the record of a run: the rows that it took from these shards and the step of each, both
    of shape (samples,), without texts that were masked, by their `text_hash`."""
    columns = _lessons(shards, rows, steps, rows)
    # By text, step, start and row: `lexsort` takes the first key last.
    order = np.lexsort((columns[4], columns[1], columns[3], columns[0]))
    order = order[~np.isin(columns[0][order], text_numbers(masked))]
    table = pa.table([column[order] for column in columns], names=TRAINED_SCHEMA.names)
    pq.write_table(
        table.cast(TRAINED_SCHEMA), path, row_group_size=_RECORDS_IN_GROUP, compression="zstd"
    )


def _lessons(shards: ShardSet, rows: np.ndarray, *figures: np.ndarray) -> list[np.ndarray]:
    """`(texts, starts, ends)` of all segments of these rows, shard by shard, and a row's figures
    beside each of its segments."""
    numbers, parts = np.searchsorted(shards.ends, rows, side="right"), []
    for number, shard in enumerate(shards.shards):
        in_shard = numbers == number
        local = rows[in_shard] - (shards.ends[number] - shard.entry.rows)
        counts = shard.row_offsets[local + 1] - shard.row_offsets[local]
        of_rows = (np.repeat(figure[in_shard], counts) for figure in figures)
        parts.append((*stretches_of(shard, local), *of_rows))
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def read_trained(url: str, texts: Sequence[int] | np.ndarray) -> pa.Table:
    """The records of some texts (`text_numbers`), of `TRAINED_SCHEMA`; parts of the file without
    one are not read."""
    wanted_texts = pa.array(np.asarray(texts, np.uint64))
    with files.open_file(url) as file:
        return pq.read_table(file, filters=pc.field("text").isin(wanted_texts))


def open_trained(url: str) -> pa.Table:
    """All records of a run, of `TRAINED_SCHEMA`: 28 bytes each, for who asks for many texts."""
    with files.open_file(url) as file:
        return pq.read_table(file).combine_chunks()


def records_of(table: pa.Table, texts: Sequence[int] | np.ndarray) -> pa.Table:
    """The records of some texts, out of records in the order of the file."""
    ordered, wanted_texts = table["text"].to_numpy(), np.unique(np.asarray(texts, np.uint64))
    first = np.searchsorted(ordered, wanted_texts)
    return table.take(spans(first, np.searchsorted(ordered, wanted_texts, side="right") - first))


def texts_of(table: pa.Table) -> np.ndarray:
    """The texts of such records, each once, in order: uint64."""
    # They are ordered already, and sorting millions of them is most of what a trace would take.
    texts = table["text"].to_numpy()
    return np.asarray(texts[run_starts(texts)])
