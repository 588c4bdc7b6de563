"""Sets documents aside whose ids later stages, terminals and pages could not bear."""

from collections.abc import Iterator
from dataclasses import replace

from artifacts.document_ids import find_id_fault
from artifacts.shown import shown_in_line
from llm_assets.sources.chunks import Batch, Chunks
from llm_assets.sources.document import Document
from llm_assets.sources.faults import Fault


def checked(chunks: Chunks) -> Chunks:
    """The same chunks, with a fault in place of every document without a proper id."""

    def read(numbers: list[int]) -> Iterator[tuple[int, Batch]]:
        for number, batch in chunks.read(numbers):
            yield number, [one if isinstance(one, Fault) else _checked(one) for one in batch]

    return replace(chunks, read=read)


def _checked(document: Document) -> Document | Fault:
    identifier = document.id
    fault = find_id_fault(identifier)
    if fault is None:
        return document
    place = shown_in_line(document.path or document.source)
    return Fault("bad_id", f"{place}: the id '{shown_in_line(identifier[:80])}' {fault}.")
