"""A source as it is at one moment: its text in chunks, and what lies beside it.

A chunk is read and cached as a whole, and found again when other chunks have changed.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from artifacts.cache import read_cached, write_cached
from artifacts.errors import shown_in_line
from artifacts.settings import with_whole_characters
from artifacts.storage import files
from artifacts.store.identity import hash_json
from spark_jobs.read.document import (
    EMPTY,
    EXAMPLES,
    MOST_EXAMPLES,
    SCHEMA,
    Document,
    Fault,
    find_id_fault,
    to_table,
)
from spark_jobs.read.source_file import RemoteFile

_LEAST_BYTES, _MOST_BYTES = 2 * 1024 * 1024, 64 * 1024 * 1024

T = TypeVar("T")


@dataclass(frozen=True)
class Chunks:
    """A source, cut into chunks in the order of its documents."""

    keys: list[str]
    """A hash of all that decides the documents of each chunk."""
    read: Callable[[list[int]], Iterator[tuple[int, Document | Fault]]]
    """Takes ascending numbers of chunks; yields their documents, each with its chunk's number."""
    files: list[list[RemoteFile]] | None = None
    """The files of each chunk, if they are in a bucket, so that any machine can read them
    (`snapshot.listed_chunk`)."""


def group(elements: Iterable[T], about: Callable[[T], tuple[str, int]]) -> list[list[T]]:
    """A source's elements in groups of some megabytes, each of which becomes a chunk (`cut`)."""
    return list(cut(elements, about, _LEAST_BYTES, _MOST_BYTES))


def chunk_key(files: Iterable[tuple[str, str]]) -> str:
    """The key of a chunk: its files' names and hashes. Files of two folders may have one name."""
    return hash_json({"files": list(files)})


def file_chunks(
    files: list[list[RemoteFile]], read: Callable[[RemoteFile], Iterator[Document | Fault]]
) -> Chunks:
    """Chunks of files in a bucket, given a way to read one of these."""

    def read_chunks(numbers: list[int]) -> Iterator[tuple[int, Document | Fault]]:
        for number in numbers:
            for file in files[number]:
                for document in read(file):
                    yield number, document

    keys = [chunk_key((file.name, file.listed_state) for file in chunk) for chunk in files]
    return Chunks(keys, read_chunks, files)


def single_chunk(key: str, read: Callable[[], Iterator[Document | Fault]]) -> Chunks:
    """A source that cannot be read in part."""
    return Chunks(
        [key], lambda numbers: ((0, document) for document in read()) if numbers else iter(())
    )


def cut(
    elements: Iterable[T], about: Callable[[T], tuple[str, int]], least: int, most: int
) -> Iterator[list[T]]:
    """Cut a sequence where its content says so, and not after so many elements.

    Where a sequence has not grown, it is then cut as before, and what was made of those parts is
    found again: content-defined chunking (Muthitacharoen and others, "A Low-bandwidth Network File
    System", 2001), with whole elements in place of bytes.

    Args:
        about: an element's name and its size in bytes.
        least: bytes of a part, unless the sequence ends; from there on, an element ends its part
            about once in so many bytes.
        most: bytes after which a part ends at the next element, whatever it is.
    """
    part: list[T] = []
    pending = 0
    for element in elements:
        name, size = about(element)
        part.append(element)
        pending += size
        # By the element alone, so that those before it do not decide.
        if pending >= most or (pending >= least and hash64(name) % least < size):
            yield part
            part, pending = [], 0
    if part:
        yield part


def hash64(text: str) -> int:
    """A number in [0, 2**64) that follows from the text alone."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


Texts = dict[str, str | None]
"""Id to text; None of a file that cannot be read."""


@dataclass
class SkippedFiles:
    """Files, folders and links of a source that are passed over."""

    counts: Counter[str] = field(default_factory=Counter)
    """Kind, such as `hidden` or `.png`, to how many."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Kind to the first names."""
    most: int = EXAMPLES
    """Names that are kept of each kind."""

    def add(self, kind: str, name: str) -> None:
        """Count one."""
        self.counts[kind] += 1
        names = self.examples.setdefault(kind, [])
        if len(names) < self.most:
            names.append(shown_in_line(name))

    def merge(self, other: "SkippedFiles") -> None:
        """Count those of another source, too, and keep all their names."""
        self.counts += other.counts
        for kind, names in other.examples.items():
            self.examples.setdefault(kind, []).extend(names)

    def __str__(self) -> str:
        """`12 .png (a.png, b.png, ...), 1 FIFO (pipe)`, the most frequent first."""
        parts = []
        for kind, count in sorted(self.counts.items(), key=lambda item: (-item[1], item[0])):
            names = ", ".join(self.examples[kind]) + (", ..." if count > EXAMPLES else "")
            parts.append(f"{count:,} {kind} ({names})")
        return ", ".join(parts)


@dataclass(frozen=True)
class OpenedSource:
    """What a source holds now, and the way to read just that."""

    fingerprints: dict[str, str]
    """A hash of the content, by the source's name (for packages: `source/package`)."""
    cut: Callable[[], Chunks]
    """Cuts it into chunks; of a table that is exported for that, only once it is to be copied."""
    unread: SkippedFiles = field(default_factory=SkippedFiles)
    """What was found beside it."""
    sizes: dict[str, int] = field(default_factory=dict, repr=False)
    """Digest of each file to its bytes, where the source is made of files."""
    libraries: frozenset[str] = frozenset()
    """Libraries that decide its text."""
    extracted: Callable[[Collection[str]], Texts] | None = field(default=None, repr=False)
    """For a source of files: the texts of some files that the named libraries read."""

    def sample(self, libraries: Collection[str]) -> Texts:
        """Some texts, preferably of those that the named libraries read."""
        if self.extracted and (extracts := self.extracted(libraries)):
            return extracts
        documents = (document for _, document in islice(self.chunks.read([0]), 200))
        return {
            document.id: document.text for document in documents if isinstance(document, Document)
        }

    @cached_property
    def chunks(self) -> Chunks:
        """What is read, cut into chunks."""
        return self.cut()


# Writing a source's chunks as Parquet files, each chunk with a record of its content.
# The documents of a snapshot have text, and unique ids that later stages can handle.
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
    faults: Counter[str] = Field(default_factory=Counter)
    """Reason to documents that cannot be used."""
    examples: list[str] = Field(default_factory=list)
    """Messages of the first faults."""
    unread: SkippedFiles = Field(default_factory=SkippedFiles)
    """What archives hold that is not read."""
    decoded: SkippedFiles = Field(default_factory=SkippedFiles)
    """Files that are not UTF-8, by their encodings, and are read nevertheless."""
    licenses: Counter[str] = Field(default_factory=Counter)
    """License to documents."""


def write_chunks(chunks: Chunks, folder: Path, cache: str | None) -> list[ChunkRecord]:
    """Write the Parquet files of all chunks into a folder, reading only what is not cached; gives
    the records of all chunks, in order."""
    folder.mkdir(parents=True, exist_ok=True)
    fetch = partial(_fetch, folder=folder, cache=cache)
    with ThreadPoolExecutor(_READERS) as readers:
        records = list(readers.map(fetch, chunks.keys))
    missing = [number for number, record in enumerate(records) if record is None]
    # Documents come chunk by chunk, so each chunk is one group.
    for number, documents in groupby(chunks.read(missing), key=lambda numbered: numbered[0]):
        key = chunks.keys[number]
        records[number] = _write_chunk((document for _, document in documents), folder, key, cache)
    for number in missing:
        # Reading says nothing of a chunk without any document.
        records[number] = records[number] or _write_chunk((), folder, chunks.keys[number], cache)
    return [record for record in records if record is not None]


def _fetch(key: str, folder: Path, cache: str | None) -> ChunkRecord | None:
    """Write a cached chunk's files; None where anything of it is absent or damaged."""
    if cache is None or (content := read_cached(cache, key)) is None:
        return None
    record = ChunkRecord.model_validate_json(bytes(content))
    for name in record.files:
        file = read_cached(cache, name)
        if file is None:
            # Removed from the cache, or damaged: the whole chunk is read again.
            return None
        (folder / name).write_bytes(file)
    return record


def _write_chunk(
    documents: Iterable[Document | Fault], folder: Path, key: str, cache: str | None
) -> ChunkRecord:
    """Write a chunk's documents, cut into row groups and files by their bytes, and cache it."""
    record = ChunkRecord()
    parquet: pq.ParquetWriter | None = None
    finished = 0
    usable = _usable(documents, record)
    for row_group in cut(usable, lambda document: (document.id, _bytes(document)), *PART_BYTES):
        if parquet is None:
            name = f"{key}-{len(record.files):05d}"
            parquet = open_parquet(folder / name)
            record.files.append(name)
        parquet.write_table(to_table(row_group))
        # The record counts the bytes of all row groups up to this one.
        if record.bytes - finished >= FILE_BYTES:
            parquet.close()
            parquet, finished = None, record.bytes
    if parquet is not None:
        parquet.close()
    if cache:
        for name in record.files:
            write_cached(cache, name, (folder / name).read_bytes())
        # Last, since it names the files: a chunk whose record is there is whole.
        write_cached(cache, key, record.model_dump_json().encode())
    return record


def _usable(documents: Iterable[Document | Fault], record: ChunkRecord) -> Iterator[Document]:
    """The documents that a corpus can hold; these and the faults are counted in the record."""
    for item in documents:
        document = check_document(item)
        if isinstance(document, Fault):
            count_fault(document, record, record.examples)
            continue
        document.text = with_whole_characters(document.text)
        if document.example:
            document.example = with_whole_characters(document.example)
        record.documents += 1
        record.bytes += _bytes(document)
        if document.license:
            record.licenses[document.license] += 1
        yield document


def _bytes(document: Document) -> int:
    text = document.text
    # Python knows whether a text is ASCII without reading it.
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def open_parquet(target: Path | pa.NativeFile) -> pq.ParquetWriter:
    """A writer of a snapshot's Parquet files."""
    return pq.ParquetWriter(target, SCHEMA, compression="zstd", write_page_checksum=True)


def count_fault(fault: Fault, record: Any, messages: list[str], most: int = EXAMPLES) -> None:
    """Count a fault where a record has such, and keep the first messages of a reason and a file."""
    if fault.counted != "dropped":
        getattr(record, fault.counted).add(fault.reason, fault.message)
        return
    record.faults[fault.reason] += 1
    file = re.match(r".+?, (row|line|element) ", fault.message)
    is_new = file and not any(message.startswith(file[0]) for message in messages)
    if record.faults[fault.reason] <= most or (is_new and len(messages) < MOST_EXAMPLES):
        messages.append(fault.message)


def check_document(document: Document | Fault) -> Document | Fault:
    """Return the document, or its fault: it has no text, or an id that later stages, terminals or
    pages cannot handle."""
    if isinstance(document, Fault):
        return document
    place = document.place or shown_in_line(document.path or document.source)
    named = f"{place}: the id '{shown_in_line(document.id[:80])}'"
    if fault := find_id_fault(document.id):
        return Fault("bad_id", f"{named} {fault}.")
    return document if document.text.strip() else Fault(EMPTY, f"{named} has no text.")


def number_repeated_ids(parts: list[Path]) -> int:
    """Number ids that come again, in the order of the parts: `a`, `a#2`, `a#3`.

    A part that needs it is written again. Returns how many ids were given a number. Past one
    machine's memory Spark does the same (`job.number_repeated_ids`).
    """
    ids = [pq.read_table(part, columns=["id"])["id"] for part in parts]
    together = pa.chunked_array([chunk for column in ids for chunk in column.chunks], pa.string())
    # Usually no id repeats, and no part need be written again.
    if len(together.unique()) == len(together):
        return 0
    unique = UniqueIds()
    repeated = 0
    for part, of_part in zip(parts, ids, strict=True):
        changed = dict(unique.changes(of_part.to_pylist()))
        repeated += len(changed)
        if changed:
            change_ids(str(part), changed)
    return repeated


def change_ids(url: str, changed: Mapping[int, str]) -> None:
    """Write a snapshot's file again with other ids in some rows; its row groups stay as they are.

    Doing so again changes nothing, so a task may run twice.
    """
    sink = pa.BufferOutputStream()
    parquet = pq.ParquetFile(pa.BufferReader(files.read(url)), page_checksum_verification=True)
    first = 0
    with open_parquet(sink) as writer:
        for number in range(parquet.num_row_groups):
            table = parquet.read_row_group(number)
            ids = table["id"].to_pylist()
            # `changed` counts rows through the whole file, and this group begins at `first`.
            for row in changed.keys() & range(first, first + len(ids)):
                ids[row - first] = changed[row]
            column = pa.array(ids, pa.string())
            # The first column of `SCHEMA` is the id.
            writer.write_table(table.set_column(0, table.schema.field("id"), column))
            first += len(ids)
    # In the old file's place, and not into it: files of equal chunks are links to one another
    # (`snapshot._lay_out`), and the others keep their ids.
    files.write(url, sink.getvalue().to_pybytes(), sync=False)


class UniqueIds:
    """Makes ids unique; it keeps 8 bytes per id, and not the ids."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def changes(self, ids: Iterable[str]) -> Iterator[tuple[int, str]]:
        """Continue with further ids: the places and new ids of those that came before."""
        for place, identifier in enumerate(ids):
            unique = self._make_unique(identifier)
            if unique != identifier:
                yield place, unique

    def _make_unique(self, identifier: str) -> str:
        key = hash64(identifier)
        count = self._seen.get(key, 0) + 1
        self._seen[key] = count
        # The id with its number may be another document's own.
        return identifier if count == 1 else self._make_unique(f"{identifier}#{count}")
