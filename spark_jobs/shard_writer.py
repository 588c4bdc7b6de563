"""The last tasks of the tokenising job: pack each shard's documents into rows and write it."""

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from artifacts.shards import DOCUMENT_SCHEMA, PackedRows, Split, token_dtype, write_shard
from spark_jobs.mixing import Mixing
from spark_jobs.packing import PACKINGS, DocumentTokens, count_cut_documents
from spark_jobs.settings import DecontaminationSettings
from spark_jobs.split import Splitter
from spark_jobs.tasks import spare_overhead

_DOCUMENTS = pa.schema(
    [
        ("position", pa.int64()),
        ("id", pa.string()),
        ("cluster", pa.string()),
        ("source", pa.string()),
        ("bytes", pa.int64()),
        ("tokens", pa.binary()),
        ("absent", pa.int64()),
    ]
)
"""What passes from the first tasks to the last ones."""


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

    def shard_number(self, split: Split, position: int) -> int:
        """The shard that holds a position in [0, 2**63) of a split."""
        return self._first_numbers[split] + (self.shards[split] * position >> 63)

    @cached_property
    def _first_numbers(self) -> dict[Split, int]:
        ends = itertools.accumulate(self.shards.values(), initial=0)
        return dict(zip(self.shards, ends, strict=False))


def pack(documents: pa.Table) -> bytes:
    """Documents as they pass from one task to another."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _DOCUMENTS) as stream:
        stream.write_table(documents.select(_DOCUMENTS.names).cast(_DOCUMENTS))
    return sink.getvalue().to_pybytes()


def unpack(content: bytes) -> pa.Table:
    """What `pack` has packed."""
    return pa.ipc.open_stream(content).read_all()


def shard_writer(plan: Plan) -> Callable[[Iterable[tuple[int, bytes]]], Iterator[dict[str, Any]]]:
    """A task that writes one shard of documents in any order, and describes it."""

    def write(pieces: Iterable[tuple[int, bytes]]) -> Iterator[dict[str, Any]]:
        spare_overhead()
        found = list(pieces)
        if found:
            split, name = plan.shard_names[found[0][0]]
            documents = pa.concat_tables([unpack(content) for _, content in found])
            ordered = documents.sort_by([("position", "ascending"), ("id", "ascending")])
            yield _write_one(name, split, ordered, plan)

    return write


def _write_one(name: str, split: Split, documents: pa.Table, plan: Plan) -> dict[str, Any]:
    packed_tokens = [_flat_tokens(chunk, plan.dtype) for chunk in documents["tokens"].chunks]
    tokens = np.concatenate([flat for flat, _ in packed_tokens])
    lengths = np.concatenate([length for _, length in packed_tokens])
    starts = np.cumsum(lengths) - lengths
    pack = PACKINGS[plan.packing]
    rows = pack(DocumentTokens(tokens, starts), plan.sequence_length, plan.end_token_id)
    _check_nothing_lost(name, rows, len(tokens))
    table = documents.append_column("length", pa.array(lengths, pa.int64()))
    table = table.select(["id", "cluster", "source", "bytes", "length"])
    _store(plan.output, name, rows, table.rename_columns(DOCUMENT_SCHEMA.names))
    by_source: Counter[str] = Counter()
    for source, length in zip(documents["source"].to_pylist(), lengths.tolist(), strict=True):
        by_source[source] += length
    return {
        "name": name,
        "split": split,
        "rows": len(rows.tokens),
        "tokens": len(tokens),
        "documents": documents.num_rows,
        "cut_documents": count_cut_documents(rows),
        "absent": sum(documents["absent"].to_pylist()),
        "tokens_by_source": dict(by_source),
    }


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
