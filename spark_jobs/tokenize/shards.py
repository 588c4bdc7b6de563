"""From tokenized documents to shards: shuffled, packed into rows, written.

Tokens go through Spark's own shuffle, which spills them, and sends them again after the loss of an
executor. All rows of a part for one receiver form one record, an Arrow stream: in Java a record
costs more than its bytes. The last tasks pack each shard's documents into rows of one length,
losing no token, and write it.
"""

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from artifacts.examples import Form
from artifacts.numbers import run_starts, sorted_unique
from artifacts.progress import Report
from artifacts.shards import format
from artifacts.storage import files
from spark_jobs.decontaminate.overlap import References, write_list
from spark_jobs.runtime.parquet import Part, flat_bytes, to_stream
from spark_jobs.runtime.tasks import progress, spread, user_errors
from spark_jobs.settings import DecontaminationSettings, ExampleSettings
from spark_jobs.tokenize.survey import Mixing
from spark_jobs.tokenize.tokenizer import ExampleTokenizer, TokenizerFiles


@dataclass(frozen=True)
class DocumentTokens:
    """Documents one after another, start and end tokens included."""

    tokens: np.ndarray
    """All token ids."""
    starts: np.ndarray
    """Where each document begins; documents are not empty."""


def concatenate(
    documents: DocumentTokens, sequence_length: int, padding_id: int
) -> format.PackedRows:
    """Fill rows with one document after another; what does not fit goes on in the next row.

    Only the last row is padded.
    """
    total = len(documents.tokens)
    rows = -(-total // sequence_length)
    tokens = np.empty(rows * sequence_length, documents.tokens.dtype)
    tokens[:total], tokens[total:] = documents.tokens, padding_id
    # A segment begins wherever a document or a row begins.
    cuts = sorted_unique(np.concatenate([documents.starts, np.arange(0, total, sequence_length)]))
    number = np.searchsorted(documents.starts, cuts, side="right") - 1
    segments = np.empty(len(cuts), format.SEGMENT)
    segments["start"] = cuts % sequence_length
    segments["length"] = np.diff(cuts, append=total)
    segments["document"] = number
    segments["offset"] = cuts - documents.starts[number]
    row_offsets = np.searchsorted(cuts, np.arange(rows + 1) * sequence_length)
    return format.PackedRows(tokens.reshape(rows, sequence_length), segments, row_offsets)


def best_fit(documents: DocumentTokens, sequence_length: int, padding_id: int) -> format.PackedRows:
    """Keep every document that fits into a row whole; longer ones are cut into whole rows first.

    Each piece, longest first, goes into the fullest row that has room for it: the best-fit
    decreasing of Ding and others, "Fewer Truncations Improve Language Modeling" (2024). What rows
    have left is padding.
    """
    ends = np.append(documents.starts[1:], len(documents.tokens))
    number, offset, length = _pieces(ends - documents.starts, sequence_length)
    row_of, rows = _best_fit_rows(length, sequence_length)
    # Within a row, documents are in their own order, however they got there: the same bytes
    # each time.
    order = np.lexsort((offset, number, row_of))
    number, offset, length, row_of = (part[order] for part in (number, offset, length, row_of))
    row_offsets = np.searchsorted(row_of, np.arange(rows + 1))
    before = np.cumsum(length) - length
    segments = np.empty(len(number), format.SEGMENT)
    segments["start"] = before - before[row_offsets[row_of]]
    segments["length"], segments["document"], segments["offset"] = length, number, offset
    tokens = np.full(rows * sequence_length, padding_id, documents.tokens.dtype)
    within = np.arange(length.sum()) - np.repeat(before, length)
    places = np.repeat(row_of * sequence_length + segments["start"], length) + within
    tokens[places] = documents.tokens[np.repeat(documents.starts[number] + offset, length) + within]
    return format.PackedRows(tokens.reshape(rows, sequence_length), segments, row_offsets)


def _pieces(sizes: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents cut into row-sized pieces and a rest: `(document, offset, length)` of each."""
    counts = -(-sizes // row)
    number = np.repeat(np.arange(len(sizes)), counts)
    place = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = place * row
    return number, offset, np.minimum(row, sizes[number] - offset)


def _best_fit_rows(lengths: np.ndarray, row: int) -> tuple[np.ndarray, int]:
    """Which row each piece goes to, and how many rows there are."""
    row_of = np.empty(len(lengths), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(row + 1)]
    # Bit n is set while some open row has exactly n places left, so that the tightest fit is found
    # by looking at bits and not at rows.
    available = 0
    rows = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = available >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            fullest = open_rows[room].pop()
            if not open_rows[room]:
                available &= ~(1 << room)
        else:
            fullest, room = rows, row
            rows += 1
        row_of[piece] = fullest
        room_left = room - length
        if room_left:
            open_rows[room_left].append(fullest)
            available |= 1 << room_left
    return row_of, rows


def one_per_row(
    documents: DocumentTokens, sequence_length: int, padding_id: int
) -> format.PackedRows:
    """A row for each document, none of which is longer than that."""
    ends = np.append(documents.starts[1:], len(documents.tokens))
    lengths = ends - documents.starts
    count = len(lengths)
    tokens = np.full((count, sequence_length), padding_id, documents.tokens.dtype)
    tokens[np.arange(sequence_length) < lengths[:, None]] = documents.tokens
    segments = np.zeros(count, format.SEGMENT)
    segments["length"], segments["document"] = lengths, np.arange(count)
    return format.PackedRows(tokens, segments, np.arange(count + 1))


PACKINGS = {"concatenate": concatenate, "best_fit": best_fit, "one_per_row": one_per_row}


def count_cut_documents(rows: format.PackedRows) -> int:
    """How many documents lie in more than one segment."""
    return len(sorted_unique(rows.segments["document"][rows.segments["offset"] > 0]))


MARK_BIT = 31
"""A bit above all token ids, for the mark of a token that is learnt."""

SENT_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("id", pa.string()),
        ("cluster", pa.string()),
        ("source", pa.string()),
        ("bytes", pa.int64()),
        ("tokens", pa.binary()),
        ("absent", pa.int64()),
        ("text_hash", pa.string()),
        ("slice", pa.int64()),
        ("targets", pa.binary()),
    ]
)
"""A document on its way to its shard."""


@dataclass(frozen=True)
class ShardPlan:
    """What every task of one run knows."""

    output: str
    sequence_length: int
    packing: str
    vocab_size: int
    start_token_id: int
    end_token_id: int
    references: References | None
    """The n-grams of held-out texts; None where overlap is not looked for."""
    decontamination: DecontaminationSettings
    mixing: Mixing
    form: Form
    examples: ExampleSettings
    labels: tuple[str, ...]
    """Of labeled texts, the classes by their numbers."""
    shards: dict[format.Split, int]
    """Into how many shards each split is cut; follows from the corpus alone."""

    lists: int
    """Number of lists of the documents that overlap too much; follows from the corpus alone."""

    @property
    def example_identity(self) -> Any:
        """What decides an example's tokens; None for plain text."""
        if self.form == "pretraining":
            return None
        settings = self.examples.model_dump(mode="json")
        return [self.form, settings, self.sequence_length, list(self.labels)]

    def example_tokenizer(self, files: TokenizerFiles) -> ExampleTokenizer:
        """Turns the corpus's examples into tokens."""
        return ExampleTokenizer(
            files, self.form, self.examples, self.sequence_length, self.end_token_id, self.labels
        )

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(format.token_dtype(self.vocab_size)).newbyteorder("<")

    @cached_property
    def shard_names(self) -> list[tuple[format.Split, str]]:
        """The split and the name of every shard, by its number over all splits."""
        return [
            (split, f"{split}-{number:05d}")
            for split, count in self.shards.items()
            for number in range(count)
        ]

    def list_numbers(self, documents: pa.Table) -> np.ndarray:
        """The list of each document that is left out, by its `position`."""
        # A position lies in [0, 2**63), so its upper half in [0, 2**31).
        return (documents["position"].to_numpy() >> 32) * self.lists >> 31

    def shard_numbers(self, documents: pa.Table) -> np.ndarray:
        """The shard of each document, by its `split` and its `position` in [0, 2**63)."""
        splits = pc.index_in(documents["split"], pa.array(self.shards)).to_numpy()
        counts = np.array(list(self.shards.values()))
        firsts = np.cumsum(counts) - counts
        # The upper half of the product of a position and a count that fits 31 bits.
        position = documents["position"].to_numpy()
        high, low = position >> 32, position & 0xFFFFFFFF
        within = (high * counts[splits] + (low * counts[splits] >> 32)) >> 31
        return firsts[splits] + within


def write_documents(
    name: str, split: format.Split, documents: pa.Table, plan: ShardPlan
) -> dict[str, Any]:
    """Write documents (`SENT_SCHEMA`, in order) as one shard, and describe it."""
    content, offsets = flat_bytes(documents["tokens"].combine_chunks())
    tokens, lengths = content.view(plan.dtype), np.diff(offsets // plan.dtype.itemsize)
    marks = None
    if plan.form != "pretraining":
        marks = _flat_marks(documents["targets"], lengths)
    rows = _pack(tokens, marks, lengths, documents["slice"].to_numpy(), plan)
    packed = int(rows.segments["length"].sum())
    # No `assert`, which `python -O` would leave out.
    if packed != len(tokens):
        raise AssertionError(f"packing {name} made {packed} tokens of {len(tokens)}")
    table = documents.append_column("length", pa.array(lengths, pa.int64()))
    columns = ["id", "cluster", "source", "bytes", "length", "text_hash", "slice"]
    table = table.select(columns)
    _store(plan.output, name, rows, table.rename_columns(format.DOCUMENT_SCHEMA.names))
    by_source = table.group_by("source").aggregate([("length", "sum")]).to_pylist()
    return {
        "name": name,
        "split": split,
        "rows": len(rows.tokens),
        "tokens": len(tokens),
        "documents": documents.num_rows,
        "cut_documents": count_cut_documents(rows),
        "absent": pc.sum(documents["absent"]).as_py(),
        "tokens_by_source": {row["source"]: row["length_sum"] for row in by_source},
    }


def _flat_marks(targets: pa.ChunkedArray, lengths: np.ndarray) -> np.ndarray:
    """Which tokens are learnt, document after document; of plain text, all."""
    parts = zip(targets.to_pylist(), lengths.tolist(), strict=True)
    marks = [np.ones(n, np.uint8) if m is None else np.frombuffer(m, np.uint8) for m, n in parts]
    return np.concatenate([np.empty(0, np.uint8), *marks])


def _pack(
    tokens: np.ndarray,
    marks: np.ndarray | None,
    lengths: np.ndarray,
    slices: np.ndarray,
    plan: ShardPlan,
) -> format.PackedRows:
    """Pack documents in the order of their slices; no row mixes two slices.

    So the rows of earlier slices stay as they are when text arrives, and training can take the rows
    of new text first.
    """
    bounds = np.append(run_starts(slices).nonzero()[0], len(slices))
    ends = np.append(0, np.cumsum(lengths))
    packed = []
    if marks is not None:
        # A token and its mark are packed as one number.
        tokens = tokens.astype(np.uint32) | marks.astype(np.uint32) << MARK_BIT
    for first, last in itertools.pairwise(bounds.tolist()):
        starts = ends[first:last] - ends[first]
        content = DocumentTokens(tokens[ends[first] : ends[last]], starts)
        rows = PACKINGS[plan.packing](content, plan.sequence_length, plan.end_token_id)
        # A packing counts documents from the slice's first.
        rows.segments["document"] += first
        packed.append(rows)
    rows = format.join_rows(packed)
    if marks is None:
        return rows
    unmarked = (rows.tokens & ((1 << MARK_BIT) - 1)).astype(plan.dtype)
    return replace(rows, tokens=unmarked, targets=(rows.tokens >> MARK_BIT).astype(np.uint8))


def _store(url: str, name: str, rows: format.PackedRows, documents: pa.Table) -> None:
    if files.is_local(url):
        files.make_folder(url)
        format.write_shard(Path(url), name, rows, documents)
        return
    with tempfile.TemporaryDirectory() as scratch:
        format.write_shard(Path(scratch), name, rows, documents)
        for file in sorted(Path(scratch).iterdir()):
            files.upload(file, f"{url}/{file.name}")


class NumberedRows(NamedTuple):
    """Rows of one schema, and the number that each is sent to."""

    to: np.ndarray
    rows: pa.Table


def shuffle(
    spark: SparkSession,
    parts: Sequence[Part],
    send: Callable[[tuple[int, Part]], list[NumberedRows]],
    receive: Callable[[tuple[int, pa.Table]], dict[str, Any]],
    receivers: int,
    report: Report,
) -> list[dict[str, Any]]:
    """Send all rows to their receivers.

    The driver gets one record per receiver, and nothing of what goes from senders to receivers.

    Args:
        send: returns what a part, given with its number, sends to which numbers; rows for one
            number have one schema.
        receive: makes a record from all rows for a number, which come in any order.
        receivers: how many numbers there are; no two may leave the same remainder divided by it.

    Returns:
        The records of the numbers that got any rows, in no order.

    Raises:
        UserError: what a task raised as such, with its message.
    """
    context = spark.sparkContext
    label = "tokenizing and writing shards"
    with spread(context, parts) as numbered, user_errors(), progress(context, label, report):
        sent = numbered.flatMap(partial(_streams, send=send))
        # Each number has a partition of its own, since no two leave one remainder.
        arrived = sent.partitionBy(receivers, int)
        return arrived.mapPartitions(partial(_receive, receive=receive)).collect()


def _streams(
    part: tuple[int, Part], send: Callable[[tuple[int, Part]], list[NumberedRows]]
) -> Iterator[tuple[int, bytes]]:
    """All that a part sends: each receiver's number, and its rows as an Arrow stream."""
    for to, rows in send(part):
        order = np.argsort(to, kind="stable")
        ordered = rows.combine_chunks().take(order)
        bounds = np.unique(to[order], return_index=True, return_counts=True)
        for number, first, count in zip(*(column.tolist() for column in bounds), strict=True):
            yield number, to_stream(ordered.slice(first, count))


def _receive(
    arrived: Iterable[tuple[int, bytes]],
    receive: Callable[[tuple[int, pa.Table]], dict[str, Any]],
) -> Iterator[dict[str, Any]]:
    """Receive what came for one number."""
    streams = list(arrived)
    if streams:
        tables = [pa.ipc.open_stream(content).read_all() for _, content in streams]
        yield receive((streams[0][0], pa.concat_tables(tables)))


UNUSED = -1
"""Receiver's number, instead of a shard's: gets the counts of what is not used."""
FIRST_LIST = -2
"""Receiver's number of the first list of documents that overlap too much; then -3 and on."""

UNUSED_SCHEMA = pa.schema([("left_out", pa.string()), ("documents", pa.int64())])
"""Why documents are not used, and how many."""


def count_receivers(plan: ShardPlan) -> int:
    """The number of receivers: the shards, the lists, and one for what is not used."""
    return len(plan.shard_names) + plan.lists + 1


def receive(arrived: tuple[int, pa.Table], plan: ShardPlan) -> dict[str, Any]:
    """Process the rows of one receiver: write a shard or a list, or add up counts.

    Returns:
        `shard`, what is known of it; or `removed`, the split of listed documents to how many; or
        `unused`, the reason to how many.
    """
    number, rows = arrived
    if number == UNUSED:
        counts: Counter[str] = Counter()
        for row in rows.to_pylist():
            counts[row["left_out"]] += row["documents"]
        return {"unused": dict(counts)}
    if number <= FIRST_LIST:
        return {"removed": write_list(FIRST_LIST - number, rows, plan.output)}
    split, name = plan.shard_names[number]
    # Rows arrive in any order; sorted, they give the same shard under any partitioning.
    ordered = rows.sort_by([(key, "ascending") for key in ("slice", "position", "id")])
    return {"shard": write_documents(name, split, ordered, plan)}
