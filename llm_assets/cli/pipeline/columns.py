"""What the text of a folder's tables is: the columns that `init` writes into the pipeline file."""

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import PurePath
from typing import Any

import pyarrow.parquet as pq

from artifacts.errors import shown_in_line
from artifacts.settings import value_at
from llm_assets.config import name_from
from spark_jobs.read.document import EXAMPLES, Fault
from spark_jobs.read.files.markup import MARKUP
from spark_jobs.read.files.rows import PROSE_WORDS, json_records, table_rows
from spark_jobs.read.files.streams import BadFile, Content, SourceChanged, decode, wide_encoding_of
from spark_jobs.read.formats import TABLES, FormatName
from spark_jobs.read.opened import hash64
from spark_jobs.read.records import UnusableRow, take_example
from spark_jobs.read.settings import ConversationColumns, Files, template_columns
from spark_jobs.read.source_file import StoredFile

BODIES = ("text", "content", "body", "article", "document", "markdown", "description")
TITLES = ("title", "subject", "summary", "name", "headline", "heading")
QUESTIONS = ("question", "prompt", "instruction", "query", "q")
ANSWERS = ("answer", "response", "completion", "output", "reply", "a")
EXAMPLES_SHARE, MOST_SOURCES = 0.5, 20
"""Share of a folder's bytes from which on its conversations decide what is learned; and sources of
them, one for each file where those of a format differ."""
ROWS = 20
"""First ones of a file that are looked at."""
SAMPLED_FILES = 1_000
"""Of a format, that are looked at."""
NAME_CHARACTERS = 200
"""Longest name of a column; questionnaires have whole questions for names."""
HEAD_BYTES = 4 * 1024 * 1024
HTML_SHARE = 0.1
"""Share of rows with tags above which text is HTML. Other text would lose its blank lines."""
CHAT = re.compile(r"\[\{[^{}]*'role': '(?:system|user|human)'")
"""How a chat begins in a row as Python writes it."""

Sources = list[dict[str, Any]]
Columns = tuple[str, str]
"""`text_column` or `text_template`, and its value."""
DEFAULT_COLUMN: Columns = ("text_column", "text")
"""Where a source names no other."""


def plan_columns(
    source: Files, files: list[StoredFile]
) -> tuple[dict[str, Any], list[FormatName], list[str]]:
    """Settings of a source that say what the text of its tables is, and what was decided.

    Returns:
        `text_column` or `text_template`; formats without any column of text; notes.
    """
    counts: Counter[Columns] = Counter()
    without, notes = [], []
    marks: list[tuple[bool, bool]] = []
    for name in TABLES:
        of_format = [file for file in files if file.format.name == name]
        # By a hash of their names: the first ones by name may all be of one kind or year.
        sample = sorted(of_format, key=lambda item: hash64(item.name))[:SAMPLED_FILES]
        looks = [_look(source, file) for file in sample]
        written = (str(row) for rows, _ in looks for row in rows)
        marks += [(bool(MARKUP.search(row)), bool(CHAT.search(row))) for row in written]
        columns = [text_columns(rows) for rows, _ in looks]
        counts.update(filter(None, columns))
        faults = [fault for _, fault in looks if fault]
        if any(columns):
            notes += [f"mend this table: {fault}" for fault in faults[:EXAMPLES]]
        elif sample:
            reason = f"no row can be read ({sample[0].name})"
            if any(rows for rows, _ in looks):
                reason = (
                    "no text column found; name one in a source's `text_column` or `text_template` "
                    f"({sample[0].name})"
                )
            without.append(name)
            notes.append(f"left out: {len(of_format):,} {name}: {(faults or [reason])[0]}")
    # A row takes the first template of which it has all columns, so the largest come first.
    ordered = sorted(counts, key=lambda item: (-item[1].count("{"), -counts[item]))
    settings: dict[str, Any] = {}
    if len(ordered) > 1:
        templates = [value if key == "text_template" else f"{{{value}}}" for key, value in ordered]
        settings = {"text_template": templates}
    elif ordered and ordered != [DEFAULT_COLUMN]:
        settings = dict(ordered)
    for key, value in ordered:
        notes.append(f"tables read by `{key}` ({counts[key, value]:,}): {shown_in_line(value)}")
    if sum(has_tags for has_tags, _ in marks) > HTML_SHARE * len(marks):
        settings["strip_html"] = True
        notes.append("HTML in tables is read without its tags (`strip_html`)")
    asks = any("\nAnswer: {" in value for _, value in ordered)
    if asks or any(is_chat for _, is_chat in marks):
        notes.append(
            "questions and answers, or chats: this pipeline learns to continue them as text; to "
            "learn to answer, set `recipe: fine_tuning` (llm-assets docs recipes)"
        )
    return settings, without, notes


def plan_examples(source: Files, files: list[StoredFile]) -> tuple[Sources, list[StoredFile]]:
    """Sources of the conversations, and questions with answers, that a folder mostly holds, and
    their files; none where it holds more other text."""
    sources: dict[str, dict[str, Any]] = {}
    read: list[StoredFile] = []

    def add(name: str, place: dict[str, Any], examples: dict[str, str]) -> None:
        # The last two are names of what `init` adds.
        while name in (*sources, "other_text", "package_docs"):
            name += "_"
        values = {"type": "files", "name": name, **place, "examples": examples}
        sources[name] = {**values, "on_bad_file": "quarantine"}

    for form in TABLES:
        tables = [file for file in files if file.format.name == form]
        columns = [example_columns(_look(source, file)[0]) for file in tables[:SAMPLED_FILES]]
        if columns and columns[0] and all(one == columns[0] for one in columns):
            # The folder, so that a table that comes later is read, too.
            add("chats", {"path": source.path, "formats": [form]}, columns[0])
            read += tables
            continue
        for file, examples in zip(tables, columns, strict=False):
            if examples:
                name = name_from(PurePath(file.name).stem, "chats")
                add(name, {"path": f"{source.path}/{file.name}"}, examples)
                read.append(file)
    size, whole = (sum(file.size for file in some) for some in (read, files))
    if size < EXAMPLES_SHARE * whole or len(sources) > MOST_SOURCES:
        return [], []
    return list(sources.values()), read


def example_columns(rows: list[dict[str, Any]]) -> dict[str, str] | None:
    """The columns of the conversations that records are; None where most of them are none."""
    _, value = text_columns(rows) or DEFAULT_COLUMN
    # Not a list of labels, which are words.
    lists = (name for row in rows for name, held in row.items() if str(held).startswith("[{"))
    examples = {"form": "conversations", "messages_column": next(lists, "messages")}
    if all({"instruction", "input", "output"} <= row.keys() for row in rows):
        examples = {"form": "conversations", "layout": "alpaca"}
    elif asks := re.fullmatch(r"Question: {(.+)}\nAnswer: {(.+)}", value):
        examples = {"form": "conversations", "layout": "prompt_answer"}
        examples |= {"prompt_column": asks[1], "answer_column": asks[2]}
    columns, usable = ConversationColumns.model_validate(examples), 0
    for row in rows:
        with suppress(UnusableRow):
            take_example(partial(value_at, row), columns)
            usable += 1
    return examples if rows and 2 * usable >= len(rows) else None


def _look(source: Files, file: StoredFile) -> tuple[list[dict[str, Any]], str | None]:
    """The first rows of a file, none if it cannot be read, and why a table has no column names."""
    content = Content(file, source, lambda number: None)
    rows = []
    try:
        for record in islice(_rows(content), ROWS):
            rows += [record] if isinstance(record, dict) else []
    except _UnnamedError as error:
        return [], f"{file.name}: {error}"
    except (BadFile, SourceChanged, ValueError, csv.Error, RecursionError):
        pass  # Those before the fault say what the columns are.
    return rows, None


def _rows(content: Content) -> Iterator[Any]:
    form = content.file.format
    if form.name == "json":
        records = islice(json_records(content), ROWS)
        yield from (record[0] for record in records if not isinstance(record, Fault))
        return
    with content.open() as stream:
        if form.name == "parquet":
            batches = pq.ParquetFile(stream).iter_batches(ROWS)
            yield from (row for batch in batches for row in batch.to_pylist())
        else:
            # Python's own limit of 128 KB is for a field, and here a field may be a document.
            csv.field_size_limit(content.maximum_bytes)
            head = stream.read(HEAD_BYTES)
            if encoding := wide_encoding_of(head):
                # An incremental decoder leaves out half of a character at the end of the head.
                text = codecs.getincrementaldecoder(encoding)().decode(head)
            else:
                # The head may end in the middle of a character, so only whole lines are decoded.
                end = head.rfind(b"\n") + 1 if len(head) == HEAD_BYTES else None
                text, _ = decode(head[:end])
            table = table_rows(io.StringIO(text, newline=""))
            rows = list(islice(table, ROWS))
            _need_names(list(table.fieldnames or []), text_columns(rows))
            yield from rows


class _UnnamedError(Exception):
    """A table's columns have no names that tell them apart."""


def _need_names(names: list[str], columns: Columns | None) -> None:
    """Raise if the first line holds no names, or if the name of a chosen column is there several
    times, which a run would refuse."""
    if any(len(name) > NAME_CHARACTERS for name in names):
        raise _UnnamedError(
            f"its first line holds more than {NAME_CHARACTERS} characters in a field, so it seems "
            "to be text and no column's name; put a line of column names above it"
        )
    key, value = columns or ("", "")
    used = [value] if key == "text_column" else template_columns(value)
    if repeated := [name for name in used if names.count(name) > 1]:
        raise _UnnamedError(
            f"several columns have the name {shown_in_line(repeated[0])!r}, so there is no telling "
            "which is meant; rename all but one"
        )


def text_columns(records: list[dict[str, Any]]) -> Columns | None:
    """What to take for the text of records; None where no column has any."""
    keys = list(dict.fromkeys(key for record in records for key in _keys(record)))
    prose = [key for key in keys if _is_prose([value_at(record, key) for record in records])]
    texts = [key for key in keys if any(isinstance(value_at(r, key), str) for r in records)]
    question, answer = (_first(texts, names) for names in (QUESTIONS, ANSWERS))
    # Among options such as `a` and `b`, `a` may be wrong, and the answer is only a letter.
    has_options = {"a", "b"} <= set(map(_last, keys))
    if question and answer and not has_options:
        return "text_template", f"Question: {{{question}}}\nAnswer: {{{answer}}}"
    title, body = _first(texts, TITLES), _first(texts, BODIES)
    if body and _last(body) == "text":
        return "text_column", body
    columns = list(dict.fromkeys([*filter(None, (title if prose or body else None, body)), *prose]))
    if len(columns) <= 1:
        return ("text_column", columns[0]) if columns else None
    labels = {key: _last(key).replace("_", " ").capitalize() for key in columns}
    lines = [f"{{{k}}}" if k in (title, body) else f"{labels[k]}: {{{k}}}" for k in columns]
    return "text_template", "\n".join(lines)


def _first(keys: list[str], names: tuple[str, ...]) -> str | None:
    """The key with the first of these names that any key has."""
    # The order is reversed, so that of several keys that end in the same name the first one counts.
    by_name = {_last(key): key for key in reversed(keys)}
    return next((by_name[name] for name in names if name in by_name), None)


def _last(key: str) -> str:
    return key.rpartition(".")[2].strip().lower()


def _keys(record: dict[str, Any]) -> Iterator[str]:
    """Keys that a template can name, and those within keys."""
    for key, value in record.items():
        if isinstance(value, dict):
            yield from (f"{key}.{inner}" for inner in _keys(value))
        # A template gives these characters a meaning, so it cannot name a column that has one.
        elif key and not set("{}[]!:") & set(key):
            yield key


def _is_prose(values: list[Any]) -> bool:
    """Whether texts, or lists of text, have as many words on average as prose has."""
    parts = [value if isinstance(value, list) else [value] for value in values]
    joined = [" ".join(part) for part in parts if all(isinstance(item, str) for item in part)]
    texts = [text for text in joined if text.strip()]
    return bool(texts) and sum(len(text.split()) for text in texts) >= PROSE_WORDS * len(texts)
