"""The rows of JSON, of tables and of Parquet files, each of which is a document."""

import codecs
import csv
import io
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, dropwhile
from typing import Any, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.settings import value_at
from artifacts.words import count_words
from spark_jobs.read.document import Document, Fault
from spark_jobs.read.files.markup import without_html
from spark_jobs.read.files.streams import (
    LOOKED_AT,
    BadFile,
    Content,
    OverlongLine,
    decode,
    is_damaged_utf_8,
    lines_of,
    wide_encoding_of,
)
from spark_jobs.read.records import as_document
from spark_jobs.read.settings import Files, template_columns
from spark_jobs.read.source_file import BLOCK_BYTES

WHOLE_JSON_BYTES = 256 * 1024 * 1024
"""Largest JSON file that is one value; it is read into memory as a whole."""
PROSE_WORDS = 4
"""Words from which on a value is taken for text."""
BATCH_BYTES = 8 * 1024 * 1024
BATCH_ROWS = 1_000
_MISSING = object()

Record = tuple[Any, str, int]
"""The value of a row, its place and its number."""


def _documents(rows: Iterable[Record | Fault], content: Content) -> Iterator[Document | Fault]:
    """The documents of a file's rows; raises BadFile in the end where several all lack the text's
    columns, as once these were renamed: few beside all rows of the source, they would go unseen."""
    source, lacking = content.source, 0
    found: list[str] = []
    columns = source.columns[:-1] if source.id_column else source.columns
    for record in rows:
        if isinstance(record, Fault):
            yield record
            continue
        row = record[0]
        if isinstance(row, dict) and lacking >= 0:
            has_any = any(value_at(row, column, _MISSING) is not _MISSING for column in columns)
            lacking, found = -1 if has_any else lacking + 1, found or list(row)[:12]
        yield _document(row, content, *record[1:])
    if lacking > 1:
        raise _lacks(content, columns[0], found)


def _document(row: Any, content: Content, where: str, number: int) -> Document | Fault:
    """The document of a file's row, or what is wrong with it."""
    place = f"{content.file.shown}, {where}"
    own_id = f"{content.file.name}:{number}"
    row = without_html(row) if content.source.strip_html else row
    document = as_document(row, content.source, place, own_id, content.file.name)
    if isinstance(document, Document):
        size = len(document.example or document.text)
        if size > content.maximum_bytes:
            return content.too_large(where, size)
    return document


def read_json(content: Content) -> Iterator[Document | Fault]:
    """The rows of JSON lines, or of a file that is one list or one object."""
    yield from _documents(json_records(content), content)


def json_records(content: Content) -> Iterator[Record | Fault]:
    """What the rows of JSON lines say, or of a file that is one list or one object; reading raises
    BadFile where the file is damaged, or is one value that is too large or no JSON."""
    file = _JsonFile(content)
    # Any other ending, such as `.jsonl`, promises lines.
    in_lines = content.file.format.ending != ".json" or _JsonFile(content).holds_lines()
    yield from file.lines() if in_lines else file.elements()
    yield from (content.decoded(encoding) for encoding in sorted(file.encodings))


@dataclass
class _JsonFile:
    """A file of JSON, read line by line or as one value."""

    content: Content
    encodings: set[str] = field(default_factory=set)
    """Those other than UTF-8 that were met in it so far."""

    def holds_lines(self) -> bool:
        """Whether an object is on the file's first line, so that it is read line by line.

        An export that is one object on one line is read as a whole.
        """
        with self._open_lines(ahead=True) as lines:
            some = (line for line in lines if isinstance(line, OverlongLine) or line.strip())
            # A file without a line has no rows.
            first, second = next(some, b"{}"), next(some, None)
        if isinstance(first, OverlongLine):
            return False
        try:
            value = self._load(first)
        except ValueError:
            return False
        wraps = _wrapped_rows(value, self.content.source) is not None
        return isinstance(value, dict) and (second is not None or not wraps)

    def lines(self) -> Iterator[Record | Fault]:
        """The rows of a file that has one on each line."""
        content = self.content
        with self._open_lines() as lines:
            for number, line in enumerate(lines, start=1):
                where = f"line {number}"
                if isinstance(line, OverlongLine):
                    yield content.too_large(where, line.length)
                    continue
                if not line.strip():
                    continue
                try:
                    yield self._load(line), where, number
                except UnicodeDecodeError as error:
                    yield content.not_utf8(where, error)
                except ValueError as error:
                    reason = f"{content.file.shown}, {where}: not valid JSON ({error})."
                    yield Fault("not_json", reason)

    def elements(self) -> Iterator[Record]:
        """The rows of a file that is one list, or one object, which is a row or wraps some."""
        content = self.content
        with content.open() as stream:
            beginning = stream.read(WHOLE_JSON_BYTES + 1)
            if len(beginning) > WHOLE_JSON_BYTES:
                raise BadFile(
                    f"{content.file.shown} is one JSON value of over "
                    f"{WHOLE_JSON_BYTES / 1e6:,.0f} MB. Make it JSON lines, which are read one by "
                    "one: jq -c '.[]' file.json > file.jsonl"
                )
            # JSON's own reader decodes UTF-16 and UTF-32, but does not report it.
            if encoding := wide_encoding_of(beginning):
                self.encodings.add(encoding)
            try:
                value = self._load(beginning)
            except UnicodeDecodeError:
                # It is a ValueError, too; `Content.open` says what to do about an encoding.
                raise
            except ValueError as error:
                raise BadFile(
                    f"{content.file.shown} is not valid JSON ({error}). Repair it there, or take "
                    "it out of the source."
                ) from error
        wrapped = _wrapped_rows(value, content.source)
        # A row by itself is an object, such as one conversation.
        rows = wrapped or (value if isinstance(value, list) else [value])
        for number, row in enumerate(rows, start=1):
            yield row, f"element {number}", number

    @contextmanager
    def _open_lines(
        self, ahead: bool = False
    ) -> Iterator[Iterator[bytes | OverlongLine] | Iterator[str | OverlongLine]]:
        """The file's lines, as text where it is in UTF-16."""
        with self.content.open(ahead) as stream:
            if encoding := wide_encoding_of(stream.peek(LOOKED_AT)):
                self.encodings.add(encoding)
                # Not cut as bytes: one of a letter's two bytes may look like a line end.
                text = io.TextIOWrapper(stream, encoding, newline="\n")
                yield lines_of(text, "\n", self.content.maximum_bytes)
            else:
                yield lines_of(stream, b"\n", self.content.maximum_bytes)

    def _load(self, encoded: bytes | str) -> Any:
        """What JSON says in whichever encoding.

        Raises:
            UnicodeDecodeError: there is no telling the encoding.
            ValueError: it is no JSON, or too deep.
        """
        try:
            try:
                return json.loads(encoded)
            except UnicodeDecodeError:
                assert isinstance(encoded, bytes)
                text, encoding = decode(encoded, self.content.source.encoding)
                self.encodings.update([encoding] if encoding else [])
                return json.loads(text)
        except RecursionError as error:
            raise ValueError("its values lie too deep within one another") from error


def _wrapped_rows(value: Any, source: Files) -> list[Any] | None:
    """The rows of an object that only wraps them, as exports do: `{"total": 2, "issues": [...]}`;
    None where there is not exactly one list of objects, or something to read beside it."""
    if not isinstance(value, dict):
        return None
    lists = [
        member
        for member in value.values()
        if isinstance(member, list) and member and all(isinstance(row, dict) for row in member)
    ]
    if len(lists) != 1:
        return None
    (rows,), columns = lists, source.columns
    own = [value_at(value, column) for column in columns]
    if all(own) and any(value_at(row, c, _MISSING) is _MISSING for row in rows for c in columns):
        return None
    # A feed has a short `description` beside those of its entries, which are what is to be read.
    beside = own if all(own) else list(value.values())
    says = any(isinstance(v, str) and count_words(v) >= PROSE_WORDS for v in beside)
    return None if says else rows


def read_csv(content: Content) -> Iterator[Document | Fault]:
    """The rows of a table with a line of column names."""
    # Python's own limit, 128 KiB a field, would refuse longer texts.
    csv.field_size_limit(content.maximum_bytes)
    encoding = _other_encoding(content)
    if encoding:
        yield content.decoded(encoding)
    with content.open() as stream:
        # A file of no bytes is empty, not damaged.
        if not stream.peek(1):
            return
        # As `csv` asks: a line end in a quoted field is text, and stays as it is.
        text = io.TextIOWrapper(stream, encoding=encoding or "utf-8-sig", newline="")
        try:
            plain = _has_plain_quotes(content, encoding)
            ended: list[bool] = []
            rows = table_rows(_until_the_end(text, ended), plain)
            wanted = {column.strip(): column for column in content.source.columns}
            # The settings, too, may name a column with the blanks that its table has.
            names = rows.fieldnames = [wanted.get(n, n) for n in rows.fieldnames or []]
            if names and ended:
                raise _open_quote(content, "the line of column names")
            _need_columns(content, names)
            for number, record in enumerate(rows, start=1):
                # A row that is whole ends before the file's end is reached.
                if ended:
                    raise _open_quote(content, f"row {number}")
                # Where a text's own separator is not quoted, its rest lies beyond the last column.
                if any(record.get(None) or ()):
                    yield Fault(
                        "too_many_fields",
                        f"{content.file.shown}, row {number}: more fields than the table has "
                        "columns. Put a text that holds the separator in double quotes, or give "
                        "each column a name.",
                    )
                else:
                    yield _document(record, content, f"row {number}", number)
        except csv.Error as error:
            raise BadFile(
                f"{content.file.shown} is not a readable table ({error}). Repair the file, or, if "
                "a field is meant to be so long, raise `maximum_document_megabytes` of the source."
            ) from error


def _until_the_end(text: TextIO, ended: list[bool]) -> Iterator[str]:
    yield from text
    ended.append(True)


def _open_quote(content: Content, where: str) -> BadFile:
    return BadFile(
        f"{content.file.shown}, {where}: a field begins with a double quote that nothing closes, "
        "so that all lines after it would be its text. Close the quote, or, where it is part of "
        "the text, write it twice and put the field in quotes."
    )


def _has_plain_quotes(content: Content, encoding: str | None) -> bool:
    """Whether double quotes are ordinary characters, as they often are in tables separated by tabs:
    read as a table of quoted fields, such a file has errors."""
    with content.open(ahead=True) as stream:
        text = io.TextIOWrapper(stream, encoding=encoding or "utf-8-sig", newline="")
        form, lines = _head(text)
        if form.delimiter != "\t":
            return False
        try:
            deque(csv.reader(lines, form, strict=True), maxlen=0)
        except csv.Error as error:
            # A field that is too long is an error in any case, and named as such.
            return "field larger" not in str(error)
    return False


def table_rows(
    text: Iterable[str], plain_quotes: bool = False, strict: bool = False
) -> "csv.DictReader[str]":
    """The rows of a table, given by its lines; fields beyond its columns are under None.

    Args:
        plain_quotes: whether quotes are characters like others.
        strict: raise csv.Error where a quote is not closed, or more follows it in its field.
    """
    form, lines = _head(text)
    form.strict = strict
    if plain_quotes:
        form.quoting = csv.QUOTE_NONE
    rows = csv.DictReader(lines, dialect=form)
    rows.fieldnames = [name.strip() for name in rows.fieldnames or []]
    return rows


_STATED_SEPARATOR = re.compile(r'"?sep=([^"\r\n])"?\s*', re.IGNORECASE)


def _head(text: Iterable[str]) -> tuple[csv.Dialect, Iterator[str]]:
    """How the columns of a table are separated, and its lines from that with their names on.

    Spreadsheets write semicolons where the comma is the decimal point, and empty lines above a
    table that does not begin at the top of its sheet. A single column has no separator, so its text
    may hold any of these.
    """
    lines = dropwhile(lambda line: not line.strip(), text)
    head = next(lines, "")
    # Excel hides such a line and obeys it, so programs that write for Excel put it on top.
    if stated := _STATED_SEPARATOR.fullmatch(head):
        head = next(filter(str.strip, lines), "")
    unquoted = re.sub(r'"[^"]*"?', "", head)
    form = csv.excel()
    # A head without any of these gets the first one, which no text has.
    form.delimiter = stated[1] if stated else max("\x1f\t,;", key=unquoted.count)
    # Where names follow a blank, a quote after one opens a field; elsewhere it is text.
    form.skipinitialspace = f"{form.delimiter} " in unquoted
    return form, chain([head] if head else [], lines)


def _other_encoding(content: Content) -> str | None:
    """The encoding of a table that is not UTF-8, by the first place that shows it; raises BadFile
    where there is no telling."""
    # A block may end within a character, which the decoder keeps for the next one.
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_ascii = True
    with content.open(ahead=True) as stream:
        if encoding := wide_encoding_of(stream.peek(LOOKED_AT)):
            return encoding
        while block := stream.read(BLOCK_BYTES):
            try:
                is_ascii = decoder.decode(block).isascii() and is_ascii
            except UnicodeDecodeError as error:
                # Where letters were UTF-8 before, a byte of this one is damaged.
                if not is_ascii or is_damaged_utf_8(error.object):
                    raise
                return content.source.encoding or decode(error.object)[1]
    return None


def read_parquet(content: Content) -> Iterator[Document | Fault]:
    """The rows of a Parquet file; checksums of its pages are compared where it has them."""
    yield from _documents(_parquet_records(content), content)


def _parquet_records(content: Content) -> Iterator[Record | Fault]:
    source = content.source
    number = 0
    with content.open() as stream:
        # A file of no bytes is empty, not damaged.
        if not stream.peek(1):
            return
        # Opened twice: how the text is best read depends on the types of the columns.
        schema = pq.ParquetFile(stream).schema_arrow
        _need_columns(content, schema.names)
        columns = [c for c in source.columns if _has(schema.names, c) or not source.templates]
        columns += _optional_columns(source)
        # `read_dictionary` does not know the name of a nested column, whose rows all have faults.
        nested = {field.name for field in schema if pa.types.is_nested(field.type)}
        one_text = not (source.examples or source.templates or source.text_column in nested)
        # A text that comes often is held once; what is read of a column at a time is bounded.
        parquet = pq.ParquetFile(
            stream,
            page_checksum_verification=True,
            read_dictionary=[source.text_column] if one_text else [],
            buffer_size=BATCH_BYTES,
        )
        for batch in parquet.iter_batches(_batch_rows(parquet, columns), columns=columns):
            for record in _records(batch):
                number += 1
                where = f"row {number}"
                if isinstance(record, UnicodeDecodeError):
                    yield content.not_utf8(where, record)
                else:
                    yield record, where, number


def count_rows(content: Content) -> int:
    """A Parquet file's rows."""
    with content.open(ahead=True) as stream:
        return pq.ParquetFile(stream).metadata.num_rows if stream.peek(1) else 0


def _batch_rows(parquet: pq.ParquetFile, columns: list[str]) -> int:
    """The number of rows that have some megabytes in those columns."""
    # The key `a.b` is read from the column `a`.
    outermost = {column.split(".")[0] for column in columns}
    largest = 1
    for number in range(parquet.metadata.num_row_groups):
        row_group = parquet.metadata.row_group(number)
        stored = map(row_group.column, range(row_group.num_columns))
        columns_read = (
            column for column in stored if column.path_in_schema.split(".")[0] in outermost
        )
        if row_group.num_rows:
            size = sum(column.total_uncompressed_size for column in columns_read)
            largest = max(largest, size // row_group.num_rows)
    return max(1, min(BATCH_ROWS, BATCH_BYTES // largest))


def _records(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | UnicodeDecodeError]:
    """The rows of a batch, one at a time; in place of one that is not UTF-8, that fault."""
    # Not `to_pylist`, by which one damaged text would take all rows of the batch with it.
    for place in range(batch.num_rows):
        try:
            yield {name: batch[name][place].as_py() for name in batch.schema.names}
        except UnicodeDecodeError as error:
            yield error


def _optional_columns(source: Files) -> list[str]:
    """Alpaca's optional column, which no setting names; of other layouts none is read."""
    return ["input"] if getattr(source.examples, "layout", None) == "alpaca" else []


def _need_columns(content: Content, names: Iterable[str]) -> None:
    present, source = list(names), content.source
    for column in (*source.columns, *_optional_columns(source)):
        read = column if column in present else column.split(".")[0]
        if present.count(read) > 1:
            raise BadFile(
                f"{content.file.shown} has {present.count(read)} columns named {read!r}, so there "
                "is no telling which is meant. Rename all but one of them."
            )
    choices = [template_columns(template) for template in source.templates] or [source.columns]
    # All columns of one template are enough for the text: only the one of ids is still to be found.
    if any(all(_has(present, column) for column in choice) for choice in choices):
        choices = [(source.id_column,)] if source.id_column else []
    for column in choices[0] if choices else ():
        if not _has(present, column):
            raise _lacks(content, column, present)


def _lacks(content: Content, column: str, present: Iterable[object]) -> BadFile:
    return BadFile(
        f"{content.file.shown} has no column {column!r}; its columns are "
        f"{', '.join(map(str, present)) or 'none'}. Name the columns in the source's settings "
        "(`text_template` takes several, for files that differ), or take "
        f"{content.file.format.name!r} out of `formats` of the source."
    )


def _has(names: list[str], column: str) -> bool:
    return column in names or column.split(".")[0] in names
