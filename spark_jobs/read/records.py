"""The document that a row is, of a file or of a dataset: by its columns, or as a task's example."""

from collections.abc import Callable
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from itertools import groupby
from math import isfinite
from operator import itemgetter
from string import Formatter
from typing import Any
from uuid import UUID

from artifacts.examples import Example, find_fault, plain_text, write_example
from artifacts.settings import value_at
from spark_jobs.read.document import Document, Fault
from spark_jobs.read.settings import (
    ExampleColumns,
    Files,
    HuggingFaceDataset,
    LabeledColumns,
    PairColumns,
    PreferenceColumns,
    template_columns,
)

Look = Callable[..., Any]
"""A row's value under a key; None, or what else is given, where the row has none."""
_MISSING = object()
_TOLD = (str, int, float, Decimal, date, time, timedelta, UUID)
"""Types of values that a text can state, and an id can be; Parquet has columns of all of them."""


class UnusableRow(Exception):
    """What a row lacks, in words that follow its place."""

    def __init__(self, said: str, reason: str = "no_example") -> None:
        super().__init__(said)
        self.reason = reason


def as_document(
    row: Any, source: Files | HuggingFaceDataset, place: str, own_id: str, path: str | None = None
) -> Document | Fault:
    """The document of a row, or what is wrong with it.

    Args:
        place: where the row is, for people.
        own_id: its id where the source names no column of ids.
        path: that of its file.
    """
    look = partial(value_at, row)
    try:
        example = take_example(look, source.examples) if source.examples else None
        text = plain_text(example) if example else _text_of(row, look, source)
        identifier = _id_of(look, source.id_column) if source.id_column is not None else own_id
    except UnusableRow as lack:
        return Fault(lack.reason, f"{place}: {lack}.")
    written = write_example(example) if example else None
    return Document(identifier, text, source.name, path=path, place=place, example=written)


def _text_of(row: Any, look: Look, source: Files | HuggingFaceDataset) -> str:
    templates = source.templates
    text = fill_template(templates, look) if templates else look(source.text_column)
    if isinstance(text, str):
        return text
    raise UnusableRow(_no_text(row, text, look, source), "no_text")


def fill_template(templates: tuple[str, ...], look: Look) -> str | None:
    """A row's text by a template; None where it has nothing under the columns of any.

    Lists are joined; a line with columns is left out if nothing is under them.
    """
    # Templates whose columns the row has come first, in the order given.
    ordered = sorted(
        templates,
        key=lambda template: any(look(c, _MISSING) is _MISSING for c in template_columns(template)),
    )
    return next(filter(None, (_fill(template, look) for template in ordered)), None)


def _fill(template: str, look: Look) -> str | None:
    lines, is_empty = [], True
    for line in template.splitlines():
        values = {column: _as_text(look(column)) for column in template_columns(line)}
        if values and not any(values.values()):
            continue
        is_empty = is_empty and not values
        # `parse` gives None as the column of text that no column follows.
        parts = Formatter().parse(line)
        lines.append("".join(before + values.get(column or "", "") for before, column, *_ in parts))
    return None if is_empty else "\n".join(lines)


def _as_text(value: Any) -> str:
    """A value within a text; what is no text, number, time, UUID or list of them is none."""
    if isinstance(value, list):
        return "\n".join(filter(None, map(_as_text, value)))
    # To Python a truth value is an integer, but `True` in a text says nothing.
    return str(value).strip() if isinstance(value, _TOLD) and not isinstance(value, bool) else ""


def _no_text(record: Any, value: Any, look: Look, source: Files | HuggingFaceDataset) -> str:
    key = source.text_column
    if source.templates:
        return f"nothing under {', '.join(source.columns)}"
    if not isinstance(record, dict):
        return f"{_kind(record)}, where an object with the key {key!r} belongs"
    if value is not None or look(key, _MISSING) is None:
        return f"no text under the key {key!r}, but {_kind(value)}"
    keys = ", ".join(map(str, list(record)[:12]))
    return (
        f"no text under the key {key!r} (found: {keys}). "
        "Set `text_column` to the key that holds the text; one within another is `outer.inner`"
    )


def _id_of(look: Look, column: str) -> str:
    identifier = look(column)
    if identifier is None:
        raise UnusableRow(f"no id under the key {column!r}", "no_id")
    if not isinstance(identifier, _TOLD) or isinstance(identifier, bool) or identifier == "":
        raise UnusableRow(f"the id is {_kind(identifier)}, not text or a number", "bad_id")
    return str(identifier)


def _kind(value: Any) -> str:
    if value == "" or (isinstance(value, float) and not isfinite(value)):
        return "an empty string" if value == "" else "no number"
    kinds = {type(None): "null", bool: "a truth value", int: "a number", float: "a number"}
    kinds |= {list: "a list", dict: "an object", bytes: "binary data", str: "a text"}
    return kinds.get(type(value), f"of the type {type(value).__name__}")


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


def take_example(look: Look, columns: ExampleColumns) -> Example:
    """The example of a row; raises UnusableRow where a column lacks what it needs, or where nothing
    can be learned from it."""
    example = _example(look, columns)
    if fault := find_fault(example):
        reason, said = fault
        raise UnusableRow(said, reason)
    return example


def _example(look: Look, columns: ExampleColumns) -> Example:
    if isinstance(columns, PairColumns):
        source, target = (_text(look, column) for column in columns.columns)
        return {"input": source, "target": target}
    if isinstance(columns, LabeledColumns):
        label = look(columns.label_column)
        # So pandas writes whole numbers where some are missing.
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        if isinstance(label, bool) or not isinstance(label, str | int):
            key = columns.label_column
            wanted = f"no class, a word or a whole number, under the key {key!r}"
            raise UnusableRow(f"{wanted}, but {_kind(label)}")
        return {"text": _text(look, columns.text_column), "label": str(label).strip()}
    if isinstance(columns, PreferenceColumns):
        return _preference(look, columns)
    if columns.layout == "messages":
        return {"messages": _answered(_messages(look, columns.messages_column))}
    prompt, answer = (_text(look, column) for column in columns.columns)
    if columns.layout == "alpaca":
        # Optional in Alpaca's own data, where it is mostly an empty text.
        text = look("input")
        template = ALPACA_WITH_INPUT if text else ALPACA
        prompt = template.format(instruction=prompt, input=text)
    return {"messages": [_turn("user", prompt), _turn("assistant", answer)]}


def _answered(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """A transcript as turns up to its last answer: what somebody writes in several messages is one
    turn, and what a user says after the last answer, such as thanks, teaches nothing."""
    turns = [
        _turn(role, "\n\n".join(filter(str.strip, (message["content"] for message in of_role))))
        for role, of_role in groupby(messages, key=itemgetter("role"))
    ]
    return turns[:-1] if [t["role"] for t in turns[-2:]] == ["assistant", "user"] else turns


def _preference(look: Look, columns: PreferenceColumns) -> Example:
    keys = {"chosen": columns.chosen_column, "rejected": columns.rejected_column}
    if columns.layout == "answers":
        prompt = [_turn("user", _text(look, columns.prompt_column))]
        return {"prompt": prompt} | {name: _text(look, key) for name, key in keys.items()}
    turns, answers = {}, {}
    for name, key in keys.items():
        *turns[name], last = _messages(look, key)
        if last["role"] != "assistant":
            raise UnusableRow(
                f"the conversation under the key {key!r} does not end with the assistant's turn"
            )
        answers[name] = last["content"]
    if turns["chosen"] != turns["rejected"]:
        raise UnusableRow("the two conversations differ before their last turn")
    return {"prompt": turns["chosen"]} | answers


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _text(look: Look, key: str) -> str:
    value = look(key)
    if not isinstance(value, str):
        raise UnusableRow(f"no text under the key {key!r}")
    return value


def _messages(look: Look, key: str) -> list[dict[str, str]]:
    turns = look(key)
    if not isinstance(turns, list) or not turns:
        raise UnusableRow(f"no list of messages under the key {key!r}")
    messages = []
    for number, message in enumerate(turns, start=1):
        turn = message if isinstance(message, dict) else {}
        role, content = turn.get("role"), turn.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise UnusableRow(
                f"message {number} under {key!r} is not an object with texts `role`, `content`"
            )
        messages.append(_turn(role, content))
    return messages
