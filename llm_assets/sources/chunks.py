"""Chunks of a source: what is read together, kept, and found again when other chunks changed."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from llm_assets.sources.cutting import Cutter
from llm_assets.sources.document import Document
from llm_assets.sources.faults import Fault

_LEAST_BYTES, _MOST_BYTES = 2 * 1024 * 1024, 64 * 1024 * 1024

Batch = list[Document | Fault]


@dataclass(frozen=True)
class Chunks:
    """A source, cut into chunks in the order of its documents."""

    keys: list[str]
    """Of each chunk, a hash of all that decides its documents."""
    read: Callable[[list[int]], Iterator[tuple[int, Batch]]]
    """Numbers of chunks, ascending, to their documents: batches, each with its chunk's number."""


NO_CHUNKS = Chunks([], lambda numbers: iter(()))
"""Of a source that is not read."""


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


def single_chunk(key: str, read: Callable[[], Iterator[Batch]]) -> Chunks:
    """A source that cannot be read in part."""
    return Chunks([key], lambda numbers: ((0, batch) for batch in read()) if numbers else iter(()))
