"""Which columns of JSON, CSV and Parquet files are text, as `llm-assets init` takes them to be."""

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pyarrow.parquet as pq

from artifacts.errors import shown_in_line
from artifacts.settings import value_at
from spark_jobs.read.files.rows import PROSE_WORDS, WHOLE_JSON_BYTES, table_rows, wrapped_rows
from spark_jobs.read.files.streams import BadFile, Content, StoredFile, decode, lines_of
from spark_jobs.read.opened import hash64
from spark_jobs.read.settings import Files, FormatName

TABLES: tuple[FormatName, ...] = ("json", "csv", "parquet")
"""Formats with columns."""
BODIES = ("text", "content", "body", "article", "document", "markdown", "description")
TITLES = ("title", "subject", "summary", "name", "headline", "heading")
QUESTIONS = ("question", "prompt", "instruction", "query", "q")
ANSWERS = ("answer", "response", "completion", "output", "reply", "a")
ROWS = 20
"""First ones of a file that are looked at."""
FILES = 1_000
"""Of a format, that are looked at."""
HEAD_BYTES = 4 * 1024 * 1024

Columns = tuple[str, str]
"""`text_column` or `text_template`, and its value."""


def plan_columns(
    source: Files, files: list[StoredFile]
) -> tuple[dict[str, Any], list[FormatName], list[str]]:
    """Settings of a source that say what the text of its tables is, and what was decided.

    Args:
        source: of the folder, with every format.

    Returns:
        `text_column` or `text_template`; formats of which no file has a column of text; notes.
    """
    found: Counter[Columns] = Counter()
    without, notes = [], []
    for name in TABLES:
        of_format = [file for file in files if file.format.name == name]
        sampled = sorted(of_format, key=lambda one: hash64(one.name))[:FILES]
        columns = [text_columns(list(_records(source, file))) for file in sampled]
        found.update(filter(None, columns))
        if of_format and not any(columns):
            without.append(name)
            first = sampled[0].name
            notes.append(
                f"{len(of_format):,} {name} files left out: no column of text ({first}); "
                "`text_column` or `text_template` of a source names one"
            )
    if not found:
        return {}, without, notes
    # A row takes the first template of which it has all columns, so the largest come first.
    ordered = sorted(found, key=lambda one: (-one[1].count("{"), -found[one]))
    if len(ordered) == 1:
        ((key, value),) = ordered
        chosen: dict[str, Any] = {} if value == "text" else {key: value}
    else:
        chosen = {"text_template": [v if k == "text_template" else f"{{{v}}}" for k, v in ordered]}
    for key, value in ordered:
        notes.append(f"{found[key, value]:,} tables: {key} {shown_in_line(value)}")
    return chosen, without, notes


def text_columns(records: list[dict[str, Any]]) -> Columns | None:
    """What to take for the text of records; None where no column has any."""
    keys = list(dict.fromkeys(key for record in records for key in _keys(record)))
    prose = [key for key in keys if _is_prose([value_at(record, key) for record in records])]
    texts = [key for key in keys if any(isinstance(value_at(r, key), str) for r in records)]
    question, answer = (_first(texts, names) for names in (QUESTIONS, ANSWERS))
    if question and answer:
        return "text_template", f"Question: {{{question}}}\nAnswer: {{{answer}}}"
    title, body = _first(texts, TITLES), _first(texts, BODIES)
    if body and _last(body) == "text":
        return "text_column", body
    chosen = list(dict.fromkeys([*filter(None, (title if prose or body else None, body)), *prose]))
    if len(chosen) <= 1:
        return ("text_column", chosen[0]) if chosen else None
    lines = [
        f"{{{key}}}" if key in (title, body) else f"{_label(key)}: {{{key}}}" for key in chosen
    ]
    return "text_template", "\n".join(lines)


def _first(keys: list[str], names: tuple[str, ...]) -> str | None:
    """The key that has the first of some names."""
    by_name = {_last(key): key for key in reversed(keys)}
    return next((by_name[name] for name in names if name in by_name), None)


def _last(key: str) -> str:
    return key.rpartition(".")[2].strip().lower()


def _label(key: str) -> str:
    return _last(key).replace("_", " ").capitalize()


def _keys(record: dict[str, Any]) -> Iterator[str]:
    """Keys that a template can name, and those within keys."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in _keys(value))
        elif key and not set("{}[]!:") & set(key):
            yield key


def _is_prose(values: list[Any]) -> bool:
    told = [" ".join(v) if _is_list_of_text(v) else v for v in values]
    texts = [text for text in told if isinstance(text, str) and text.strip()]
    return bool(texts) and sum(len(text.split()) for text in texts) >= PROSE_WORDS * len(texts)


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _records(source: Files, file: StoredFile) -> Iterator[dict[str, Any]]:
    """The first rows of a file; none of one that cannot be read."""
    content = Content(file, source, lambda number: None)
    try:
        yield from (one for one in islice(_rows(content), ROWS) if isinstance(one, dict))
    except (BadFile, ValueError, csv.Error, RecursionError):
        return


def _rows(content: Content) -> Iterator[Any]:
    form = content.file.format
    with content.open() as stream:
        if form.name == "parquet":
            batches = pq.ParquetFile(stream).iter_batches(ROWS)
            yield from (row for batch in batches for row in batch.to_pylist())
        elif form.name == "csv":
            head = stream.read(HEAD_BYTES)
            if len(head) == HEAD_BYTES:
                # A character may be cut at the end.
                head = head[: head.rfind(b"\n") + 1]
            yield from table_rows(io.StringIO(decode(head)[0], newline=""))
        else:
            yield from _json_rows(content)


def _json_rows(content: Content) -> Iterator[Any]:
    with content.open() as stream:
        lines = (line for line in lines_of(stream, content.maximum_bytes) if line != b"\n")
        first = next(lines, b"")
        try:
            row = json.loads(first) if isinstance(first, bytes) else None
        except ValueError:
            row = None
        if isinstance(row, dict):
            yield from wrapped_rows(row) or [row]
            yield from (json.loads(line) for line in lines if isinstance(line, bytes))
            return
    with content.open() as stream:
        found = json.loads(stream.read(WHOLE_JSON_BYTES))
        yield from wrapped_rows(found) or (found if isinstance(found, list) else [found])
