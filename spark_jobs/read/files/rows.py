"""The documents of files that hold one per row: JSON, CSV and Parquet."""

import csv
import io
import json
import math
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.json_rows import value_at
from spark_jobs.read.examples import take_example
from spark_jobs.read.faults import Fault
from spark_jobs.read.files.content import Content, not_utf8, too_large
from spark_jobs.read.files.streams import BadFile, Overlong, lines_of

WHOLE_JSON_BYTES = 256 * 1024 * 1024
"""Largest JSON file that is one value; it is read into memory as a whole."""
BATCH_BYTES = 8 * 1024 * 1024
BATCH_ROWS = 1_000

Row = tuple[str, str] | Fault
"""A document's id and text (of an example, `take_example`), or its fault."""


def read_json(content: Content) -> Iterator[Row]:
    """The rows of JSON lines, or of a file that is one list or one object."""
    if content.file.format.ending == ".json" and not _holds_lines(content):
        yield from _read_whole_json(content)
        return
    with content.open() as stream:
        for number, line in enumerate(lines_of(stream, content.maximum_bytes), start=1):
            where = f"line {number}"
            if isinstance(line, Overlong):
                yield too_large(content, where, line.length)
            elif line.strip():
                yield _parse(line, content, where, number)


def _parse(line: bytes, content: Content, where: str, number: int) -> Row:
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        return not_utf8(content, where, error)
    except (ValueError, RecursionError) as error:
        return Fault("not_json", f"{content.file.shown}, {where}: not valid JSON ({error}).")
    return pick(record, content, where, number)


def _holds_lines(content: Content) -> bool:
    """Whether a `.json` file has an object on its first line, so that it is read line by line."""
    with content.open() as stream:
        lines = lines_of(stream, content.maximum_bytes)
        first = next((line for line in lines if isinstance(line, Overlong) or line.strip()), b"")
    if isinstance(first, Overlong):
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _read_whole_json(content: Content) -> Iterator[Row]:
    with content.open() as stream:
        found = stream.read(WHOLE_JSON_BYTES + 1)
    if len(found) > WHOLE_JSON_BYTES:
        raise BadFile(
            f"{content.file.shown} is one JSON value of over {WHOLE_JSON_BYTES / 1e6:,.0f} MB. "
            "Make it JSON lines, which are read one by one: jq -c '.[]' file.json > file.jsonl"
        )
    try:
        records = json.loads(found)
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{content.file.shown} is not valid JSON ({error}).") from error
    for number, record in enumerate(records if isinstance(records, list) else [records], start=1):
        yield pick(record, content, f"element {number}", number)


def read_csv(content: Content) -> Iterator[Row]:
    """The rows of a table with a line of column names."""
    csv.field_size_limit(min(content.maximum_bytes, sys.maxsize))
    delimiter = "\t" if content.file.format.ending == ".tsv" else ","
    with content.open() as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        try:
            rows = csv.DictReader(text, delimiter=delimiter, restkey="(more columns)")
            _need_columns(content, list(rows.fieldnames or []))
            for number, record in enumerate(rows, start=1):
                yield pick(record, content, f"row {number}", number)
        except UnicodeDecodeError as error:
            raise BadFile(not_utf8(content, "the file", error).message) from error
        except csv.Error as error:
            raise BadFile(f"{content.file.shown} is not a readable table ({error}).") from error


def read_parquet(content: Content) -> Iterator[Row]:
    """The rows of a Parquet file; checksums of its pages are compared where it has them."""
    source = content.source
    columns = [*source.columns, *(["input"] if source.examples else [])]
    number = 0
    with content.open() as stream:
        _need_columns(content, pq.ParquetFile(stream).schema_arrow.names)
        # A text that comes often is held once; what is read of a column at a time is bounded.
        parquet = pq.ParquetFile(
            stream,
            page_checksum_verification=True,
            read_dictionary=[] if source.examples else [source.text_column],
            buffer_size=BATCH_BYTES,
        )
        for batch in parquet.iter_batches(_batch_rows(parquet, columns), columns=columns):
            for record in _records(batch):
                number += 1
                yield _row(record, content, number)


def _batch_rows(parquet: pq.ParquetFile, columns: list[str]) -> int:
    """As many rows as have some megabytes, by the file's own account of its columns."""
    largest = 1
    for number in range(parquet.metadata.num_row_groups):
        group = parquet.metadata.row_group(number)
        size = sum(
            group.column(n).total_uncompressed_size
            for n in range(group.num_columns)
            if group.column(n).path_in_schema.split(".")[0] in {c.split(".")[0] for c in columns}
        )
        if group.num_rows:
            largest = max(largest, size // group.num_rows)
    return max(1, min(BATCH_ROWS, BATCH_BYTES // largest))


def _records(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """The rows of a batch, one at a time; in place of one that is not UTF-8, that fault."""
    for place in range(batch.num_rows):
        try:
            yield {name: batch[name][place].as_py() for name in batch.schema.names}
        except UnicodeDecodeError as error:
            yield error


def _row(record: dict[str, Any] | UnicodeDecodeError, content: Content, number: int) -> Row:
    if isinstance(record, UnicodeDecodeError):
        return not_utf8(content, f"row {number}", record)
    return pick(record, content, f"row {number}", number)


def _need_columns(content: Content, names: Iterable[str]) -> None:
    found = list(names)
    for column in content.source.columns:
        if column not in found and column.split(".")[0] not in found:
            raise BadFile(
                f"{content.file.shown} has no column {column!r}; its columns are "
                f"{', '.join(found) or 'none'}. Name the columns in the source's settings, or take "
                f"{content.file.format.name!r} out of `formats` of the source."
            )


def pick(record: Any, content: Content, where: str, number: int) -> Row:
    """A record's id and text, or what is wrong with it."""
    source, shown = content.source, content.file.shown
    if source.examples:
        text = take_example(partial(value_at, record), source.examples, f"{shown}, {where}")
        if isinstance(text, Fault):
            return text
    else:
        text = value_at(record, source.text_column)
    if not isinstance(text, str):
        return Fault("no_text", _no_text(record, text, content, where))
    if len(text) > content.maximum_bytes:
        return too_large(content, where, len(text))
    if source.id_column is None:
        return f"{content.file.name}:{number}", text
    found = value_at(record, source.id_column)
    if found is None:
        return Fault("no_id", f"{shown}, {where}: no id under the key {source.id_column!r}.")
    if isinstance(found, bool) or not isinstance(found, str | int | float) or found == "":
        return Fault("bad_id", f"{shown}, {where}: the id is {_kind(found)}, not text or a number.")
    return str(found), text


def _no_text(record: Any, found: Any, content: Content, where: str) -> str:
    key, shown = content.source.text_column, content.file.shown
    if not isinstance(record, dict):
        return f"{shown}, {where}: {_kind(record)}, where an object with the key {key!r} belongs."
    if found is not None or key in record:
        return f"{shown}, {where}: no text under the key {key!r}, but {_kind(found)}."
    keys = ", ".join(map(str, list(record)[:12]))
    return (
        f"{shown}, {where}: no text under the key {key!r} (found: {keys}). "
        "Set `text_column` to the key that holds the text; one within another is `outer.inner`."
    )


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, int | float):
        return "a number" if math.isfinite(value) else "no number"
    kinds = {list: "a list", dict: "an object", bytes: "binary data", str: "an empty string"}
    found = (name for kind, name in kinds.items() if isinstance(value, kind))
    return next(found, f"of the type {type(value).__name__}")


def whole(stream: IO[bytes], maximum: int) -> bytes | Overlong:
    """All of a stream, or its length where it is longer than `maximum` bytes."""
    found = stream.read(maximum + 1)
    if len(found) <= maximum:
        return found
    length = len(found)
    while block := stream.read(1024 * 1024):
        length += len(block)
    return Overlong(length)
