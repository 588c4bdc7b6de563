"""The last tasks of the tokenising job: pack each shard's documents into rows and write it."""

import itertools
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from fsspec.implementations.local import LocalFileSystem

from artifacts.shards import DOCUMENT_SCHEMA, PackedRows, Split, token_dtype, write_shard
from spark_jobs.exchange import Range, read_ranges
from spark_jobs.mixing import Mixing
from spark_jobs.packing import PACKINGS, DocumentTokens, count_cut_documents
from spark_jobs.parquet import HELD_OUT_FOLDER, open_writer
from spark_jobs.settings import DecontaminationSettings
from spark_jobs.split import Splitter

EXCHANGED_SCHEMA = pa.schema(
    [
        ("position", pa.int64()),
        ("id", pa.string()),
        ("cluster", pa.string()),
        ("source", pa.string()),
        ("bytes", pa.int64()),
        ("tokens", pa.binary()),
        ("absent", pa.int64()),
        ("text", pa.string()),
    ]
)
"""A document on its way to its shard; only held-out ones have their text."""

_HELD_OUT_COLUMNS = ["id", "text", "source", "cluster", "bytes"]
_HELD_OUT_PART_BYTES = 1024 * 1024
"""Text in one row group of them, about."""


@dataclass(frozen=True)
class Plan:
    """What every task of one run knows."""

    output: str
    sequence_length: int
    packing: str
    vocab_size: int
    start_token_id: int
    end_token_id: int
    runs: str | None
    """Where the held-out texts' word runs are kept; None where overlap is not looked for."""
    decontamination: DecontaminationSettings
    mixing: Mixing
    splitter: Splitter
    shards: dict[Split, int]
    """Into how many shards each split is cut; follows from the corpus alone."""

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


def write_shard_of(ranges: tuple[int, list[Range]], plan: Plan) -> dict[str, Any]:
    """Write the shard of this number from documents in any order, and describe it."""
    split, name = plan.shard_names[ranges[0]]
    documents = read_ranges(ranges[1])
    ordered = documents.sort_by([("position", "ascending"), ("id", "ascending")])
    return _write_one(name, split, ordered, plan)


def _write_one(name: str, split: Split, documents: pa.Table, plan: Plan) -> dict[str, Any]:
    tokens, lengths = _flat_tokens(documents["tokens"].combine_chunks(), plan.dtype)
    starts = np.cumsum(lengths) - lengths
    pack = PACKINGS[plan.packing]
    rows = pack(DocumentTokens(tokens, starts), plan.sequence_length, plan.end_token_id)
    _check_nothing_lost(name, rows, len(tokens))
    table = documents.append_column("length", pa.array(lengths, pa.int64()))
    table = table.select(["id", "cluster", "source", "bytes", "length"])
    if split == "held_out":
        _store_texts(plan.output, name.replace("held_out", "part"), documents)
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


def _store_texts(url: str, name: str, documents: pa.Table) -> None:
    texts = documents.select(_HELD_OUT_COLUMNS)
    before = np.cumsum(documents["bytes"].to_numpy()) - documents["bytes"].to_numpy()
    starts = np.unique(before // _HELD_OUT_PART_BYTES, return_index=True)[1]
    with open_writer(f"{url}/{HELD_OUT_FOLDER}/{name}.parquet", texts.schema) as writer:
        for first, last in itertools.pairwise([*starts.tolist(), texts.num_rows]):
            writer.write_table(texts.slice(first, last - first), row_group_size=last - first)


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
    filesystem, folder = fsspec.core.url_to_fs(url)
    filesystem.makedirs(folder, exist_ok=True)
    if isinstance(filesystem, LocalFileSystem):
        write_shard(Path(folder), name, rows, documents)
        return
    with tempfile.TemporaryDirectory() as scratch:
        write_shard(Path(scratch), name, rows, documents)
        for file in sorted(Path(scratch).iterdir()):
            filesystem.put_file(str(file), f"{folder}/{file.name}")
