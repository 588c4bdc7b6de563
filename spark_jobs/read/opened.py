"""A source as it is at one moment: its text in chunks, and what lies beside it.

A chunk is what is read together, cached, and found again when other chunks have changed.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from pydantic import BaseModel, ConfigDict

from artifacts.errors import shown_in_line
from artifacts.store.identity import hash_json
from spark_jobs.read.document import Document, Fault

_LEAST_BYTES, _MOST_BYTES = 2 * 1024 * 1024, 64 * 1024 * 1024

Batch = list[Document | Fault]


class ListedFile(BaseModel):
    """A file of a source, as it was when the source was listed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    name: str
    """Relative to the source's folder."""
    bytes: int
    """As stored."""
    checksum: str


@dataclass(frozen=True)
class Chunks:
    """A source, cut into chunks in the order of its documents."""

    keys: list[str]
    """Of each chunk, a hash of all that decides its documents."""
    read: Callable[[list[int]], Iterator[tuple[int, Batch]]]
    """Numbers of chunks, ascending, to their documents: batches, each with its chunk's number."""
    files: list[list[ListedFile]] | None = None
    """Of each chunk the files, where they lie in a bucket, so that any machine can read them
    (`snapshot.listed_chunk`)."""


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


Texts = dict[str, str | None]
"""Id to text; None of a file that cannot be read."""
EXAMPLES = 5
"""First names that are kept of each kind."""


@dataclass
class SkippedFiles:
    """Files, folders and links of a source that are passed over."""

    counts: dict[str, int] = field(default_factory=dict)
    """Kind, such as `hidden` or `.png`, to how many."""
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Kind to the first names."""
    most: int = EXAMPLES
    """Names that are kept of each kind."""

    def add(self, kind: str, name: str) -> None:
        """Count one."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        named = self.examples.setdefault(kind, [])
        if len(named) < self.most:
            named.append(shown_in_line(name))

    def __str__(self) -> str:
        """`12 .png (a.png, b.png, ...), 1 FIFO (pipe)`, the most frequent first."""
        parts = []
        for kind, count in sorted(self.counts.items(), key=lambda item: (-item[1], item[0])):
            named = ", ".join(self.examples[kind]) + (", ..." if count > EXAMPLES else "")
            parts.append(f"{count:,} {kind} ({named})")
        return ", ".join(parts)


@dataclass(frozen=True)
class OpenedSource:
    """What a source holds now, and the way to read just that."""

    fingerprints: dict[str, str]
    """The source's name (for packages: `source/package`) to a hash of its content."""
    cut: Callable[[], Chunks]
    """Cuts it into chunks; of a table that is exported for that, only once it is to be copied."""
    unread: SkippedFiles = field(default_factory=SkippedFiles)
    """What was found beside it."""
    sizes: dict[str, int] = field(default_factory=dict, repr=False)
    """Digest of each file to its bytes, where the source is made of files."""
    libraries: frozenset[str] = frozenset()
    """Those that decide its text."""
    extracted: Callable[[Collection[str]], Texts] | None = field(default=None, repr=False)
    """Of a source of files, the texts of some of those that the named libraries read."""

    def sample(self, libraries: Collection[str]) -> Texts:
        """Some texts, of those that the named libraries read where there are any."""
        if self.extracted and (found := self.extracted(libraries)):
            return found
        documents = (one for _, batch in self.chunks.read([0]) for one in batch)
        return {one.id: one.text for one in islice(documents, 200) if isinstance(one, Document)}

    @cached_property
    def chunks(self) -> Chunks:
        """What is read, cut into chunks."""
        return self.cut()
