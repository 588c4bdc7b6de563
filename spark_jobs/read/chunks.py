"""Chunks of a source: what is read together, kept, and found again when other chunks changed."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from artifacts.store.identity import hash_json
from spark_jobs.read.document import Document
from spark_jobs.read.faults import Fault
from spark_jobs.runtime.pinned.file import ListedFile

_LEAST_BYTES, _MOST_BYTES = 2 * 1024 * 1024, 64 * 1024 * 1024

Batch = list[Document | Fault]


@dataclass(frozen=True)
class Chunks:
    """A source, cut into chunks in the order of its documents."""

    keys: list[str]
    """Of each chunk, a hash of all that decides its documents."""
    read: Callable[[list[int]], Iterator[tuple[int, Batch]]]
    """Numbers of chunks, ascending, to their documents: batches, each with its chunk's number."""
    files: list[list[ListedFile]] | None = None
    """Of each chunk the files, where they lie in a bucket, so that any machine can read them
    (`snapshot.snapshot.listed_chunk`)."""


def no_chunks() -> Chunks:
    """Of a source that is not read."""
    return Chunks([], lambda numbers: iter(()))


def group(elements: Iterable[tuple[str, int]]) -> list[range]:
    """Cut a source's elements, given by name and size in bytes, into chunks of some megabytes."""
    cutter = Cutter(_LEAST_BYTES, _MOST_BYTES, mean=_LEAST_BYTES)
    groups, first, count = [], 0, 0
    for name, size in elements:
        count += 1
        if cutter.ends(name, size):
            groups.append(range(first, count))
            first = count
    return groups + ([range(first, count)] if first < count else [])


def listed_key(listed: Iterable[ListedFile]) -> str:
    """Of a chunk of such files."""
    return hash_json({one.name: one.checksum for one in listed})


def single_chunk(key: str, read: Callable[[], Iterator[Batch]]) -> Chunks:
    """A source that cannot be read in part."""
    return Chunks([key], lambda numbers: ((0, batch) for batch in read()) if numbers else iter(()))


@dataclass
class Cutter:
    """After which elements to cut: where the content says so, not after so many elements.

    A sequence that grew in one place is then cut as before elsewhere, and what was made of those
    parts is found again: content-defined chunking (Muthitacharoen and others, "A Low-bandwidth
    Network File System", 2001), with whole elements in place of bytes.
    """

    least: int
    """Bytes that a part has at least, unless the sequence ends."""
    most: int
    """Bytes after which a part ends at the next element, whatever it is."""
    mean: int
    """In between, an element ends its part about once in so many bytes."""
    pending: int = 0
    """Bytes since the last cut."""

    def ends(self, name: str, size: int) -> bool:
        """Whether a part ends with this element, which comes next."""
        self.pending += size
        ends = self.pending >= self.most or (
            self.pending >= self.least and hash64(name) % self.mean < size
        )
        if ends:
            self.pending = 0
        return ends


def hash64(text: str) -> int:
    """A number in [0, 2**64) that follows from the text alone."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
