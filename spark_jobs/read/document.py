"""One document of the raw corpus, how it lies in Parquet, and what cannot be one.

Documents that cannot be used are set aside and counted, and fatal only when they are many.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from artifacts.errors import UserError, has_control_characters
from artifacts.examples import Example, find_fault, plain_text, read_example, write_example
from spark_jobs.read import settings

EXAMPLES = 5
"""How many are named, of each source and reason: the first ones."""
UNREAD = "unread: "
"""Prefix of the reason for what is not read, and was found only when an archive was read."""
DECODED = "decoded: "
"""Prefix of the reason for what is not UTF-8: it is counted, and learnt nevertheless."""
EMPTY = "empty"
"""The reason of documents without text, and of files without documents."""
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
    has_form = pc.and_(pc.not_equal(begins, ids), pc.or_(of_file, pc.equal(begins, sources)))
    return pc.and_(has_form, pc.is_in(sources, pa.array(numbered, pa.string())))


def is_row_number(identifier: str, source: str) -> bool:
    """Whether one id of a source that gives such ids is made so."""
    ids, sources = (pa.chunked_array([[value]]) for value in (identifier, source))
    return bool(are_row_numbers(ids, sources, [source])[0].as_py())


_NUMBER = r":\d+(#\d+)*$"
_ROWS = (
    rf"(?i)\.({'|'.join(settings.NUMBERED_ENDINGS)})"
    rf"({'|'.join(map(re.escape, settings.COMPRESSIONS))})*$"
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
    if getattr(source, "on_bad_file", "stop") == "quarantine":
        return
    maximum_share = getattr(source, "maximum_faulty_share", 0.0)
    sound = documents + faults[EMPTY]
    faulty = sum(
        count
        for reason, count in faults.items()
        if reason not in SET_ASIDE and not reason.startswith((UNREAD, DECODED))
    )
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


def of_example(
    identifier: str, example: str, source: str, place: str, path: str | None = None
) -> Document:
    """The document of an example."""
    text = plain_text(read_example(example))
    return Document(identifier, text, source, path=path, place=place, example=example)


def to_table(documents: list[Document]) -> pa.Table:
    """Documents as rows of `SCHEMA`."""
    return pa.table(
        {name: [getattr(document, name) for document in documents] for name in SCHEMA.names},
        schema=SCHEMA,
    )


Look = Callable[[str], Any]
"""A row's value under a key; None where it has none."""

ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n"
    "{instruction}\n\n### Input:\n{input}\n\n### Response:"
)
"""The prompts of Stanford Alpaca (Taori and others, 2023)."""


def take_example(look: Look, columns: settings.ExampleColumns, place: str) -> str | Fault:
    """The example of a row as `artifacts.examples.write_example` writes it, or its fault."""
    try:
        example = _example(look, columns)
    except ValueError as error:
        return Fault("no_example", f"{place}: {error}.")
    if fault := find_fault(example):
        return Fault(fault[0], f"{place}: {fault[1]}.")
    return write_example(example)


def _example(look: Look, columns: settings.ExampleColumns) -> Example:
    """Raises ValueError where a column lacks what the example needs."""
    if isinstance(columns, settings.PairColumns):
        source, target = (_text(look, column) for column in columns.columns)
        return {"input": source, "target": target}
    if isinstance(columns, settings.LabeledColumns):
        label = look(columns.label_column)
        if isinstance(label, bool) or not isinstance(label, str | int):
            key = columns.label_column
            raise ValueError(f"no class, a word or a whole number, under the key {key!r}")
        return {"text": _text(look, columns.text_column), "label": str(label)}
    if isinstance(columns, settings.PreferenceColumns):
        return _preference(look, columns)
    if columns.layout == "messages":
        return {"messages": _messages(look, columns.messages_column)}
    prompt, answer = (_text(look, column) for column in columns.columns)
    if columns.layout == "alpaca":
        text = look("input")
        template = ALPACA_WITH_INPUT if text else ALPACA
        prompt = template.format(instruction=prompt, input=text)
    return {"messages": [_turn("user", prompt), _turn("assistant", answer)]}


def _preference(look: Look, columns: settings.PreferenceColumns) -> Example:
    keys = {"chosen": columns.chosen_column, "rejected": columns.rejected_column}
    if columns.layout == "answers":
        prompt = [_turn("user", _text(look, columns.prompt_column))]
        return {"prompt": prompt} | {name: _text(look, key) for name, key in keys.items()}
    turns, answers = {}, {}
    for name, key in keys.items():
        *turns[name], last = _messages(look, key)
        if last["role"] != "assistant":
            raise ValueError(
                f"the conversation under the key {key!r} does not end with the assistant's turn"
            )
        answers[name] = last["content"]
    if turns["chosen"] != turns["rejected"]:
        raise ValueError("the two conversations differ before their last turn")
    return {"prompt": turns["chosen"]} | answers


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _text(look: Look, key: str) -> str:
    value = look(key)
    if not isinstance(value, str):
        raise ValueError(f"no text under the key {key!r}")
    return value


def _messages(look: Look, key: str) -> list[dict[str, str]]:
    turns = look(key)
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"no list of messages under the key {key!r}")
    messages = []
    for number, message in enumerate(turns, start=1):
        turn = message if isinstance(message, dict) else {}
        role, content = turn.get("role"), turn.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError(
                f"message {number} under {key!r} is not an object with texts `role`, `content`"
            )
        messages.append(_turn(role, content))
    return messages
