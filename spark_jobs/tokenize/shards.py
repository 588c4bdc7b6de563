"""The last tasks of the tokenizing job: pack each shard's documents into rows and write it."""

import itertools
import tempfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.examples import Form
from artifacts.numbers.arrays import run_starts
from artifacts.shards.format import (
    DOCUMENT_SCHEMA,
    PackedRows,
    Split,
    join_rows,
    token_dtype,
    write_shard,
)
from artifacts.storage import files
from spark_jobs.decontaminate.references import References
from spark_jobs.settings import DecontaminationSettings, ExampleSettings
from spark_jobs.tokenize.examples import ExampleTokenizer
from spark_jobs.tokenize.mixing import Mixing
from spark_jobs.tokenize.packing import PACKINGS, DocumentTokens, count_cut_documents
from spark_jobs.tokenize.tokenizer import TokenizerFiles

MARK_BIT = 31
"""Above all token ids."""

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
class Plan:
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
    shards: dict[Split, int]
    """Into how many shards each split is cut; follows from the corpus alone."""

    lists: int
    """Into how many lists the documents are cut that overlap too much; follows from the corpus."""

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
        return np.dtype(token_dtype(self.vocab_size)).newbyteorder("<")

    @cached_property
    def shard_names(self) -> list[tuple[Split, str]]:
        """The split and the name of every shard, by its number over all splits."""
        return [
            (split, f"{split}-{number:05d}")
            for split, count in self.shards.items()
            for number in range(count)
        ]

    def list_numbers(self, documents: pa.Table) -> np.ndarray:
        """The list of each document that is left out, by its `position`."""
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


def write_shard_of(number: int, documents: pa.Table, plan: Plan) -> dict[str, Any]:
    """Write the shard of this number from documents in any order, and describe it."""
    split, name = plan.shard_names[number]
    keys = ("slice", "position", "id")
    ordered = documents.sort_by([(key, "ascending") for key in keys])
    return write_documents(name, split, ordered, plan)


def write_documents(name: str, split: Split, documents: pa.Table, plan: Plan) -> dict[str, Any]:
    """Write documents (`SENT_SCHEMA`, in order) as one shard, and describe it."""
    tokens, lengths = _flat_tokens(documents["tokens"].combine_chunks(), plan.dtype)
    marks = None
    if plan.form != "pretraining":
        marks = _flat_marks(documents["targets"], lengths)
    rows = _pack(tokens, marks, lengths, documents["slice"].to_numpy(), plan)
    _check_nothing_lost(name, rows, len(tokens))
    table = documents.append_column("length", pa.array(lengths, pa.int64()))
    columns = ["id", "cluster", "source", "bytes", "length", "text_hash", "slice"]
    table = table.select(columns)
    _store(plan.output, name, rows, table.rename_columns(DOCUMENT_SCHEMA.names))
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
    plan: Plan,
) -> PackedRows:
    """Rows of documents in the order of their slices, of which no row mixes two.

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
        rows.segments["document"] += first
        packed.append(rows)
    rows = join_rows(packed)
    if marks is None:
        return rows
    unmarked = (rows.tokens & ((1 << MARK_BIT) - 1)).astype(plan.dtype)
    return replace(rows, tokens=unmarked, targets=(rows.tokens >> MARK_BIT).astype(np.uint8))


def _flat_tokens(chunk: pa.Array, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """A binary column as `(all tokens, tokens of each document)`, without a copy."""
    offsets = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset :][: len(chunk) + 1]
    content = np.frombuffer(chunk.buffers()[2], np.uint8)[offsets[0] : offsets[-1]]
    return content.view(dtype), np.diff(offsets).astype(np.int64) // dtype.itemsize


def _check_nothing_lost(name: str, rows: PackedRows, tokens: int) -> None:
    packed = int(rows.segments["length"].sum())
    if packed != tokens:
        raise AssertionError(f"packing {name} made {packed} tokens of {tokens}")


def _store(url: str, name: str, rows: PackedRows, documents: pa.Table) -> None:
    if files.is_local(url):
        files.make_folder(url)
        write_shard(Path(url), name, rows, documents)
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_shard(Path(scratch), name, rows, documents)
        for file in sorted(Path(scratch).iterdir()):
            files.upload(file, f"{url}/{file.name}")
