"""Keeps a source's pieces as Parquet files, each with a record of what is in it."""

from collections import Counter
from itertools import groupby
from pathlib import Path

import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem
from pydantic import BaseModel, ConfigDict, Field

from artifacts.atomic import write_atomically
from llm_assets.sources.cutting import Cutter
from llm_assets.sources.document import SCHEMA, Document, to_table
from llm_assets.sources.faults import EXAMPLES, Fault
from llm_assets.sources.pieces import Batch, Pieces
from spark_jobs.parquet import ORIGIN_KEY

PART_BYTES = (2 * 1024 * 1024, 16 * 1024 * 1024)
"""Least and most text in one row group, which is what one Spark task reads."""
FILE_BYTES = 64 * 1024 * 1024
"""Text in one Parquet file."""


class PieceRecord(BaseModel):
    """What is known of a piece; written after its files, so that without it there is no piece."""

    model_config = ConfigDict(extra="forbid")

    files: list[str] = Field(default_factory=list)
    """Names of its Parquet files, in order."""
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


def keep_pieces(pieces: Pieces, folder: Path) -> list[PieceRecord]:
    """Read the pieces that `folder` does not hold yet, and give the records of all, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [n for n, key in enumerate(pieces.keys) if not _record(folder, key).exists()]
    found = groupby(pieces.read(missing), key=lambda batch: batch[0])
    without = set(missing)
    for number, batches in found:
        writer = _PieceWriter(folder, pieces.keys[number])
        for _, batch in batches:
            writer.add(batch)
        writer.close()
        without.remove(number)
    for number in without:
        _PieceWriter(folder, pieces.keys[number]).close()
    return [PieceRecord.model_validate_json(_record(folder, k).read_bytes()) for k in pieces.keys]


def remove_other_pieces(folder: Path, keys: set[str]) -> None:
    """Remove what belongs to no piece of these keys."""
    for file in folder.iterdir():
        if file.name.partition(".")[0].partition("-")[0] not in keys:
            file.unlink()


def _record(folder: Path, key: str) -> Path:
    return folder / f"{key}.json"


class _PieceWriter:
    """Cuts a piece's documents into row groups and files by their bytes."""

    def __init__(self, folder: Path, key: str) -> None:
        self._folder = folder
        self._key = key
        self._record = PieceRecord()
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

    def close(self) -> None:
        """Finish the files, then write the record."""
        if self._pending:
            self._flush()
        self._close_file()
        self._record.faults, self._record.licenses = dict(self._faults), dict(self._licenses)
        record = self._record.model_dump_json().encode()
        write_atomically(LocalFileSystem(), str(_record(self._folder, self._key)), record)

    def _add_fault(self, fault: Fault) -> None:
        self._faults[fault.reason] += 1
        if len(self._record.examples) < EXAMPLES:
            self._record.examples.append(fault.message)

    def _add_document(self, document: Document) -> None:
        document.text = _repaired(document.text)
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
            name = f"{self._key}-{len(self._record.files):05d}.parquet"
            self._parquet = open_parquet(self._folder / name, origin=name)
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


def open_parquet(path: Path, origin: str) -> pq.ParquetWriter:
    """A writer of a snapshot's Parquet files; equal origins mean equal rows."""
    schema = SCHEMA.with_metadata({ORIGIN_KEY: origin})
    return pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)


def _repaired(text: str) -> str:
    """Join surrogate pairs that JSON escapes left apart; a lone surrogate becomes U+FFFD."""
    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
