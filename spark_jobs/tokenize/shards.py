"""From tokenized documents to shards: shuffled, packed into rows, written.

Tokens go through Spark's own shuffle, which spills them, and sends them again after the loss of an
executor. All rows of a part for one receiver form one record, an Arrow stream: in Java a record
costs more than its bytes. The last tasks pack each shard's documents (`packing`), and write it;
documents that overlap too much with held-out text are listed beside the shards.
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

from artifacts.examples import Form
from artifacts.numbers import run_starts
from artifacts.shards import format
from artifacts.storage import files
from spark_jobs.decontaminate.overlap import References
from spark_jobs.runtime.parquet import (
    Part,
    flat_bytes,
    list_files,
    read_table,
    to_stream,
    write_table,
)
from spark_jobs.runtime.tasks import JobRun, progress, spread, user_errors
from spark_jobs.settings import DecontaminationSettings, ExampleSettings
from spark_jobs.tokenize.packing import PACKINGS, DocumentTokens, count_cut_documents
from spark_jobs.tokenize.survey import Mixing
from spark_jobs.tokenize.tokenizer import ExampleTokenizer, TokenizerFiles

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

    # Receivers are numbered: the shards first, then the lists, then the one of all counts.
    @cached_property
    def shard_names(self) -> list[tuple[format.Split, str]]:
        """The split and the name of every shard, by its number over all splits."""
        return [
            # Five digits, since readers number all rows by the order of these names (`ShardSet`).
            (split, f"{split}-{number:05d}")
            for split, count in self.shards.items()
            for number in range(count)
        ]

    @property
    def first_list(self) -> int:
        """The receiver of the first list."""
        return len(self.shard_names)

    @property
    def unused(self) -> int:
        """The receiver that counts what is not used; the last one."""
        return self.first_list + self.lists

    def list_of(self, documents: pa.Table) -> np.ndarray:
        """The receiver of each document that is listed, by its `position`."""
        # A position lies in [0, 2**63), so its upper half in [0, 2**31).
        return self.first_list + ((documents["position"].to_numpy() >> 32) * self.lists >> 31)

    def shard_of(self, documents: pa.Table) -> np.ndarray:
        """The receiver of each document, by its `split` and its `position` in [0, 2**63)."""
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
    # In the order of `DOCUMENT_SCHEMA`, where `tokens` is a count: here `length`.
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
        # A token and its mark are packed as one number, so that packings know nothing of marks.
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
    """Rows of one schema, and the number of the receiver of each."""

    to: np.ndarray
    rows: pa.Table


def shuffle(
    run: JobRun,
    parts: Sequence[Part],
    send: Callable[[tuple[int, Part]], list[NumberedRows]],
    receive: Callable[[tuple[int, pa.Table]], dict[str, Any]],
    receivers: int,
) -> list[dict[str, Any]]:
    """Send all rows to their receivers.

    The driver gets one record per receiver, and nothing of what goes from senders to receivers.

    Args:
        send: returns what a part, given with its number, sends to which receivers; rows for one
            receiver have one schema.
        receive: makes a record from all rows for a receiver, which come in any order.
        receivers: how many there are; they are numbered from 0.

    Returns:
        The records of the receivers that got any rows, in no order.

    Raises:
        UserError: what a task raised as such, with its message.
    """
    context = run.spark.sparkContext
    label = "tokenizing and writing shards"
    with spread(context, parts) as numbered, user_errors(), progress(context, label, run.report):
        sent = numbered.flatMap(partial(_streams, send=send))
        # Each receiver has a partition of its own.
        arrived = sent.partitionBy(receivers, int)
        return arrived.mapPartitions(partial(_receive, receive=receive)).collect()


def _streams(
    part: tuple[int, Part], send: Callable[[tuple[int, Part]], list[NumberedRows]]
) -> Iterator[tuple[int, bytes]]:
    """All that a part sends: each receiver's number, and its rows as an Arrow stream."""
    for to, rows in send(part):
        order = np.argsort(to, kind="stable")
        ordered = rows.combine_chunks().take(order)
        # One stream for each receiver: with one for each document, the job takes 12.3 s of a
        # processor for 5 MB, in place of 8.6 s.
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


UNUSED_SCHEMA = pa.schema([("left_out", pa.string()), ("documents", pa.int64())])
"""Why documents are not used, and how many."""

LISTED_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("cluster", pa.string()),
        ("bytes", pa.int64()),
        ("split", pa.string()),
        ("overlap", pa.float64()),
    ]
)
"""A document that is left out, and the share of it that is reference text."""


def receive(arrived: tuple[int, pa.Table], plan: ShardPlan) -> dict[str, Any]:
    """Process the rows of one receiver: write a shard or a list, or add up counts.

    Returns:
        `shard`, what is known of it; or `removed`, the split of listed documents to how many; or
        `unused`, the reason to how many.
    """
    number, rows = arrived
    if number < plan.first_list:
        split, name = plan.shard_names[number]
        # Rows arrive in any order; sorted, they give the same shard under any partitioning.
        ordered = rows.sort_by([(key, "ascending") for key in ("slice", "position", "id")])
        return {"shard": write_documents(name, split, ordered, plan)}
    if number < plan.unused:
        return {"removed": _write_list(number - plan.first_list, rows, plan.output)}
    counts: Counter[str] = Counter()
    for row in rows.to_pylist():
        counts[row["left_out"]] += row["documents"]
    return {"unused": dict(counts)}


def _write_list(number: int, removed: pa.Table, folder: str) -> dict[str, int]:
    """Write documents as `overlaps_held_out-NNNNN.parquet` beside the shards, by id.

    Returns:
        The split that they were of, to how many.
    """
    listed = removed.sort_by("id")
    write_table(f"{folder}/overlaps_held_out-{number:05d}.parquet", listed)
    return dict(Counter(listed["split"].to_pylist()))


def find_overlap(folder: str, identifier: str) -> float | None:
    """The share of a document that is reference text, where it was left out for that."""
    for url in list_files(folder, "overlaps_held_out*.parquet"):
        removed = read_table(url, ["id", "overlap"])
        row = pc.index(removed["id"], pa.scalar(identifier)).as_py()
        if row >= 0:
            return float(removed["overlap"][row].as_py())
    return None
