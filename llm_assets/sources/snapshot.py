"""The pinned snapshot of source text: Parquet files of `(id, text, source, …)`."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from artifacts.errors import UserError
from llm_assets.sources.bigquery import fingerprint_bigquery, read_bigquery
from llm_assets.sources.bigquery_settings import BigQuery
from llm_assets.sources.docstrings import find_package, fingerprint_package, read_package_docs
from llm_assets.sources.document import SCHEMA, Document, to_table
from llm_assets.sources.faults import Quarantine
from llm_assets.sources.files import fingerprint_files, read_files
from llm_assets.sources.hugging_face import fingerprint_dataset, read_dataset
from llm_assets.sources.settings import (
    HuggingFaceDataset,
    PackageDocs,
    RawCorpusSettings,
    Source,
)

CODE_VERSION = "2"

PART_BYTES = (512 * 1024, 4 * 1024 * 1024)
"""Least and most text in one row group, which is what one Spark task reads."""
_CUT_BYTES = 512 * 1024
"""Within those bounds, a document ends its row group about once in so much text."""
FILE_BYTES = 64 * 1024 * 1024
"""Text in one Parquet file."""


def source_fingerprints(settings: RawCorpusSettings) -> dict[str, str]:
    """Source (for packages: `source/package`) to a hash of its content now.

    Raises:
        UserError: a package or path is not there.
    """
    fingerprints = {}
    for source in settings.sources:
        if isinstance(source, PackageDocs):
            for name in source.packages:
                fingerprints[f"{source.name}/{name}"] = fingerprint_package(find_package(name))
        elif isinstance(source, BigQuery):
            fingerprints[source.name] = fingerprint_bigquery(source)
        elif isinstance(source, HuggingFaceDataset):
            fingerprints[source.name] = fingerprint_dataset(source)
        else:
            fingerprints[source.name] = fingerprint_files(source)
    return fingerprints


def write_snapshot(
    settings: RawCorpusSettings, folder: Path, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Read every source and write `part-NNNNN.parquet` files; the same input gives the same bytes.

    Returns:
        The manifest's stats: `documents`, `bytes` (UTF-8), `dropped` (reason to count), `sources`
        (name to documents and bytes), `licenses` (name to documents), `faults` (the first ones of
        each source, named), `repeated_ids` (ids that were given a number).

    Raises:
        UserError: a source cannot be read, or all of them together hold no document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = _SnapshotWriter(folder)
    identifiers = _UniqueIds()
    dropped: Counter[str] = Counter()
    examples: list[str] = []
    for source in settings.sources:
        quarantine = Quarantine(source.name, getattr(source, "maximum_faulty_share", 0.0))
        for batch in _read(source, quarantine, report):
            quarantine.sound += len(batch)
            kept = [document for document in batch if document.text.strip()]
            dropped["empty"] += len(batch) - len(kept)
            for document in kept:
                document.id = identifiers.make_unique(document.id)
                document.text = _repaired(document.text)
                writer.add(document)
        quarantine.judge()
        dropped.update(quarantine.counts)
        examples += quarantine.examples
    writer.close()
    if not writer.documents:
        names = ", ".join(source.name for source in settings.sources)
        raise UserError(
            f"The raw corpus is empty: the sources ({names}) hold no document with text"
            + (f" ({dropped['empty']:,} were empty)." if dropped["empty"] else ".")
            + " Check `raw_corpus.sources`."
        )
    return writer.stats() | {
        "dropped": {reason: count for reason, count in dropped.items() if count},
        "faults": examples,
        "repeated_ids": identifiers.repeated,
    }


def _read(
    source: Source, quarantine: Quarantine, report: Callable[[str], None]
) -> Iterator[list[Document]]:
    if isinstance(source, PackageDocs):
        return read_package_docs(source, report)
    if isinstance(source, BigQuery):
        return read_bigquery(source, fingerprint_bigquery(source), report)
    if isinstance(source, HuggingFaceDataset):
        return read_dataset(source, quarantine, report)
    return read_files(source, quarantine, report)


def _repaired(text: str) -> str:
    """Join surrogate pairs that JSON escapes left apart; a lone surrogate becomes U+FFFD."""
    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _UniqueIds:
    """Gives a repeated id a number: `a`, `a#2`, `a#3`. Keeps 8 bytes an id, not the ids."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self.repeated = 0

    def make_unique(self, identifier: str) -> str:
        key = _hash64(identifier)
        count = self._seen.get(key, 0) + 1
        self._seen[key] = count
        if count == 1:
            return identifier
        self.repeated += 1
        return self.make_unique(f"{identifier}#{count}")


def _hash64(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


class _SnapshotWriter:
    """Cuts a stream of documents into row groups and files by their bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pending: list[Document] = []
        self._pending_bytes = 0
        self._file_bytes = 0
        self._files = 0
        self._parquet: pq.ParquetWriter | None = None
        self.documents = 0
        self._source_documents: Counter[str] = Counter()
        self._source_bytes: Counter[str] = Counter()
        self._licenses: Counter[str] = Counter()

    def add(self, document: Document) -> None:
        size = len(document.text.encode("utf-8", "surrogatepass"))
        self.documents += 1
        self._source_documents[document.source] += 1
        self._source_bytes[document.source] += size
        if document.license:
            self._licenses[document.license] += 1
        self._pending.append(document)
        self._pending_bytes += size
        if self._ends_part(document.id, size):
            self._flush()

    def _ends_part(self, identifier: str, size: int) -> bool:
        """Where a part ends depends on the documents, not on how many came before.

        So a corpus that grew in one place has the same parts elsewhere, and what was made of those
        is found again.
        """
        least, most = PART_BYTES
        if self._pending_bytes < least:
            return False
        return self._pending_bytes >= most or _hash64(identifier) % _CUT_BYTES < size

    def close(self) -> None:
        if self._pending:
            self._flush()
        self._close_file()

    def stats(self) -> dict[str, Any]:
        sources = {
            name: {"documents": count, "bytes": self._source_bytes[name]}
            for name, count in self._source_documents.items()
        }
        return {
            "documents": self.documents,
            "bytes": self._source_bytes.total(),
            "sources": sources,
            "licenses": dict(sorted(self._licenses.items())),
        }

    def _flush(self) -> None:
        if self._parquet is None:
            path = self._folder / f"part-{self._files:05d}.parquet"
            self._parquet = pq.ParquetWriter(path, SCHEMA, compression="zstd")
            self._files += 1
        self._parquet.write_table(to_table(self._pending))
        self._file_bytes += self._pending_bytes
        self._pending, self._pending_bytes = [], 0
        if self._file_bytes >= FILE_BYTES:
            self._close_file()

    def _close_file(self) -> None:
        if self._parquet is not None:
            self._parquet.close()
        self._parquet, self._file_bytes = None, 0
