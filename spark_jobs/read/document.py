"""One document of the raw corpus, how it lies in Parquet, and what cannot be one.

Documents that cannot be used are set aside and counted, and fatal only when they are many.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError, has_control_characters
from spark_jobs.read import formats, settings

EXAMPLES = 5
"""How many are named, of each source and reason: the first ones."""
EMPTY = "empty"
"""The reason of documents without text, and of files without documents."""
MOST_EXAMPLES = 50
"""Maximum number of a source's faults whose messages are kept."""
SET_ASIDE = ("bad_file", "no_text_layer", EMPTY)
"""Reasons that never count toward `maximum_faulty_share`: whole files, and what is empty."""


DERIVED = "#study/"
"""In the id of a text that was made from a document, between the document's id and the rest."""
MOST_ID_BYTES = 1_024


def document_of(identifier: str) -> str:
    """Id of the document that a text was made from; its own where it is one of a source."""
    return identifier.partition(DERIVED)[0]


def are_row_numbers(
    ids: pa.ChunkedArray, sources: pa.ChunkedArray, numbered: Iterable[str]
) -> pa.ChunkedArray:
    """Find ids made of a row's number in its file or dataset, which name another row as soon as one
    before it comes or goes. Only ids of sources that give such ids count
    (`RawCorpusSettings.numbered_sources`), since the keys of others may look alike."""
    begins = pc.replace_substring_regex(ids, _NUMBER, "")
    of_file = pc.match_substring_regex(begins, _ROWS)
    # A row of a file is `<path>:<number>`, one of a dataset `<source>:<number>`.
    has_form = pc.and_(pc.not_equal(begins, ids), pc.or_(of_file, pc.equal(begins, sources)))
    return pc.and_(has_form, pc.is_in(sources, pa.array(numbered, pa.string())))


def is_row_number(identifier: str, source: str) -> bool:
    """Whether one id of a source that gives such ids is made so."""
    ids, sources = (pa.chunked_array([[value]]) for value in (identifier, source))
    return bool(are_row_numbers(ids, sources, [source])[0].as_py())


# The number, and what is appended to an id that occurs again (`opened.UniqueIds`).
_NUMBER = r":\d+(#\d+)*$"
_ROWS = (
    rf"(?i)\.({'|'.join(formats.NUMBERED_ENDINGS)})"
    rf"({'|'.join(map(re.escape, formats.COMPRESSIONS))})*$"
)


def find_id_fault(identifier: str) -> str | None:
    """What is wrong with an id, in words that follow it; None where nothing is."""
    if has_control_characters(identifier):
        return "holds control characters or half a surrogate pair"
    if not identifier.strip():
        return "is empty"
    if len(identifier.encode()) > MOST_ID_BYTES:
        return f"has more than {MOST_ID_BYTES:,} bytes"
    return None


@dataclass(frozen=True)
class Fault:
    """Why a document cannot be used; `message` names its file and row."""

    reason: str
    message: str
    counted: Literal["dropped", "unread", "decoded"] = "dropped"
    """Where in the snapshot's stats. `unread` is what is not read, and was found only when an
    archive was read; `decoded` is what is not UTF-8, and learned nevertheless. Of these, the reason
    is a kind, and the message the file's name."""


def judge_faults(
    source: settings.Source, documents: int, faults: Counter[str], examples: list[str]
) -> None:
    """Raise UserError where more of a source's documents cannot be used than it allows.

    If it sets aside what it cannot read, any number is allowed.

    Args:
        documents: those without a fault.
        faults: documents by reason; empty ones count as sound, whole files set aside do not count.
        examples: messages of the first ones.
    """
    # Not every kind of source has these two settings.
    if getattr(source, "on_bad_file", "stop") == "quarantine":
        return
    maximum_share = getattr(source, "maximum_faulty_share", 0.0)
    sound = documents + faults[EMPTY]
    faulty = sum(count for reason, count in faults.items() if reason not in SET_ASIDE)
    if faulty > maximum_share * (faulty + sound):
        listed = "\n  ".join(examples)
        raise UserError(
            f"Source {source.name!r}: {faulty:,} of {faulty + sound:,} documents cannot be used, "
            f"more than the share allowed ({maximum_share:g}). The first:\n  {listed}\n"
            "Repair them, or raise `maximum_faulty_share` of the source."
        )


@dataclass(slots=True)
class Document:
    """A document as its source gives it."""

    id: str
    text: str
    source: str
    package: str | None = None
    version: str | None = None
    license: str | None = None
    path: str | None = None
    """Of the file it comes from, relative to the source's folder."""
    language: str | None = None
    """The programming language of code."""
    place: str | None = None
    """Where its source has it, for people; no column of the corpus."""
    example: str | None = None
    """Of a task's example, `artifacts.examples.write_example`; `text` is then its plain text."""


_NEEDED = ("id", "text", "source")
_OPTIONAL = ("package", "version", "license", "path", "language", "example")
SCHEMA = pa.schema(
    [pa.field(name, pa.string(), nullable=False) for name in _NEEDED]
    + [pa.field(name, pa.string()) for name in _OPTIONAL]
)


def to_table(documents: list[Document]) -> pa.Table:
    """Documents as rows of `SCHEMA`."""
    return pa.table(
        {name: [getattr(document, name) for document in documents] for name in SCHEMA.names},
        schema=SCHEMA,
    )
