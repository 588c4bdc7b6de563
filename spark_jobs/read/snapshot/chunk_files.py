"""Writes a source's chunks as Parquet files, each with a record of what is in it."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from artifacts.cache import read_cached, write_cached
from artifacts.json_rows import with_whole_characters
from spark_jobs.read.chunks import Batch, Chunks, Cutter
from spark_jobs.read.document import SCHEMA, Document, to_table
from spark_jobs.read.faults import EXAMPLES, Fault

PART_BYTES = (2 * 1024 * 1024, 16 * 1024 * 1024)
"""Least and most text in one row group, which is what one Spark task reads."""
FILE_BYTES = 64 * 1024 * 1024
"""Text in one Parquet file."""
_READERS = 4
"""Threads that read what is cached, each of which holds a file."""


class ChunkRecord(BaseModel):
    """What is known of a chunk."""

    model_config = ConfigDict(extra="forbid")

    files: list[str] = Field(default_factory=list)
    """Names of its Parquet files, in order, in a folder as in the cache."""
    documents: int = 0
    bytes: int = 0
    """Text in UTF-8."""
    empty: int = 0
    """Documents without text, which are left out."""
    faults: dict[str, int] = Field(default_factory=dict)
    """Reason to documents that cannot be used."""
    examples: list[str] = Field(default_factory=list)
    """Messages of the first faults."""
    licenses: dict[str, int] = Field(default_factory=dict)
    """License to documents."""


def write_chunks(chunks: Chunks, folder: Path, cache: str | None) -> list[ChunkRecord]:
    """Write the Parquet files of all chunks into a folder, reading only what is not cached.

    Returns:
        The records of all chunks, in order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fetch = partial(_fetch, folder=folder, cache=cache)
    with ThreadPoolExecutor(_READERS) as readers:
        records = list(readers.map(fetch, chunks.keys))
    missing = [number for number, record in enumerate(records) if record is None]
    read = {number: _ChunkWriter(folder, chunks.keys[number]) for number in missing}
    for number, batches in groupby(chunks.read(missing), key=lambda batch: batch[0]):
        for _, batch in batches:
            read[number].add(batch)
        records[number] = _keep(read.pop(number), cache)
    for number, without_documents in read.items():
        records[number] = _keep(without_documents, cache)
    return [record for record in records if record is not None]


def _fetch(key: str, folder: Path, cache: str | None) -> ChunkRecord | None:
    """Write a cached chunk's files; None where anything of it is absent or damaged."""
    content = read_cached(cache, key) if cache else None
    if cache is None or content is None:
        return None
    record = ChunkRecord.model_validate_json(bytes(content))
    for name in record.files:
        file = read_cached(cache, name)
        if file is None:
            return None
        (folder / name).write_bytes(file)
    return record


def _keep(writer: "_ChunkWriter", cache: str | None) -> ChunkRecord:
    """Finish a chunk that was read, and cache it: the record last, since it names the files."""
    record = writer.close()
    if cache:
        for name in record.files:
            write_cached(cache, name, (writer.folder / name).read_bytes())
        write_cached(cache, writer.key, record.model_dump_json().encode())
    return record


class _ChunkWriter:
    """Cuts a chunk's documents into row groups and files by their bytes."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder = folder
        self.key = key
        self._record = ChunkRecord()
        self._faults: Counter[str] = Counter()
        self._licenses: Counter[str] = Counter()
        self._cutter = Cutter(*PART_BYTES, mean=PART_BYTES[0])
        self._pending: list[Document] = []
        self._pending_bytes = self._file_bytes = 0
        self._parquet: pq.ParquetWriter | None = None

    def add(self, batch: Batch) -> None:
        for one in batch:
            if isinstance(one, Fault):
                self._add_fault(one)
            elif one.text.strip():
                self._add_document(one)
            else:
                self._record.empty += 1

    def close(self) -> ChunkRecord:
        """Finish the files, and say what is in them."""
        if self._pending:
            self._flush()
        self._close_file()
        self._record.faults, self._record.licenses = dict(self._faults), dict(self._licenses)
        return self._record

    def _add_fault(self, fault: Fault) -> None:
        self._faults[fault.reason] += 1
        if self._faults[fault.reason] <= EXAMPLES:
            self._record.examples.append(fault.message)

    def _add_document(self, document: Document) -> None:
        document.text = with_whole_characters(document.text)
        if document.example:
            document.example = with_whole_characters(document.example)
        size = len(document.text.encode("utf-8", "surrogatepass"))
        self._record.documents += 1
        self._record.bytes += size
        if document.license:
            self._licenses[document.license] += 1
        self._pending.append(document)
        self._pending_bytes += size
        if self._cutter.ends(document.id, size):
            self._flush()

    def _flush(self) -> None:
        if self._parquet is None:
            name = f"{self.key}-{len(self._record.files):05d}"
            self._parquet = open_parquet(self.folder / name)
            self._record.files.append(name)
        self._parquet.write_table(to_table(self._pending))
        self._file_bytes += self._pending_bytes
        self._pending, self._pending_bytes = [], 0
        if self._file_bytes >= FILE_BYTES:
            self._close_file()

    def _close_file(self) -> None:
        if self._parquet is not None:
            self._parquet.close()
        self._parquet, self._file_bytes = None, 0


def open_parquet(target: Path | pa.NativeFile) -> pq.ParquetWriter:
    """A writer of a snapshot's Parquet files."""
    return pq.ParquetWriter(target, SCHEMA, compression="zstd", write_page_checksum=True)
