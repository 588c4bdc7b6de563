"""The last tasks of the tokenising job: pack each shard's documents into rows and write it."""

import itertools
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

BatchMap = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]

WRITTEN_SHARD = (
    "name string, split string, rows long, tokens long, documents long, cut_documents long, "
    "absent long, tokens_by_source map<string, long>"
)


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


def shard_writer(plan: Plan) -> BatchMap:
    """A task that packs rows sorted by shard and position, and writes each shard it meets."""

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        spare_overhead()
        shards = itertools.groupby(_by_shard(batches), key=lambda part: part[0])
        for (split, number), parts in shards:
            documents = pa.Table.from_batches([part for _, part in parts])
            yield _write_one(f"{split}-{number:05d}", split, documents, plan)

    return write


def _by_shard(
    batches: Iterator[pa.RecordBatch],
) -> Iterator[tuple[tuple[Split, int], pa.RecordBatch]]:
    """Cut batches where the shard changes."""
    for batch in batches:
        keys = list(zip(batch["split"].to_pylist(), batch["shard"].to_pylist(), strict=True))
        first = 0
        for key, group in itertools.groupby(keys):
            length = sum(1 for _ in group)
            yield key, batch.slice(first, length)
            first += length


def _write_one(name: str, split: Split, documents: pa.Table, plan: Plan) -> pa.RecordBatch:
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
    record: dict[str, Any] = {
        "name": name,
        "split": split,
        "rows": len(rows.tokens),
        "tokens": len(tokens),
        "documents": documents.num_rows,
        "cut_documents": count_cut_documents(rows),
        "absent": sum(documents["absent"].to_pylist()),
        "tokens_by_source": sorted(by_source.items()),
    }
    schema = pa.schema(
        [("name", pa.string()), ("split", pa.string())]
        + [(key, pa.int64()) for key in ("rows", "tokens", "documents", "cut_documents", "absent")]
        + [("tokens_by_source", pa.map_(pa.string(), pa.int64()))]
    )
    return pa.RecordBatch.from_pylist([record], schema=schema)


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
