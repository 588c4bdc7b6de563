"""What a file's documents are: rows, or the text of a page, a PDF, a Word file, a notebook."""

import codecs
import csv
import io
import json
import logging
import math
import re
import sys
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import date, time, timedelta
from decimal import Decimal
from functools import partial
from itertools import chain
from string import Formatter
from typing import Any, TextIO
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq

from artifacts.errors import UserError, first_line, install_advice
from artifacts.settings import value_at
from artifacts.words import count_words
from spark_jobs.read.document import Document, Fault, Look, of_example, take_example
from spark_jobs.read.files import streams
from spark_jobs.read.settings import Files, template_columns

WHOLE_JSON_BYTES = 256 * 1024 * 1024
"""Largest JSON file that is one value; it is read into memory as a whole."""
PROSE_WORDS = 4
"""Words from which on a value is taken for text."""
BATCH_BYTES = 8 * 1024 * 1024
BATCH_ROWS = 1_000

JsonRecord = tuple[Any, str, int]
"""The value of a row, its place and its number."""


def read_json(content: streams.Content) -> Iterator[Document | Fault]:
    """The rows of JSON lines, or of a file that is one list or one object."""
    for record in json_records(content):
        yield record if isinstance(record, Fault) else pick(record[0], content, *record[1:])


def json_records(content: streams.Content) -> Iterator[JsonRecord | Fault]:
    """What the rows of JSON lines say, or of a file that is one list or one object; reading raises
    BadFile where the file is damaged, or is one value that is too large or no JSON."""
    if content.file.format.ending == ".json" and not _holds_lines(content):
        yield from _read_whole_json(content)
        return
    encodings: set[str] = set()
    with _json_lines(content, encodings) as lines:
        for number, line in enumerate(lines, start=1):
            where = f"line {number}"
            if isinstance(line, streams.OverlongLine):
                yield streams.too_large(content, where, line.length)
            elif line.strip():
                yield _parse(line, content, where, number, encodings)
    yield from (streams.decoded(content, encoding) for encoding in sorted(encodings))


@contextmanager
def _json_lines(
    content: streams.Content, encodings: set[str], ahead: bool = False
) -> Iterator[Iterator[bytes | str | streams.OverlongLine]]:
    """A file's lines, as text where the file is in UTF-16; that is noted among the encodings."""
    with content.open(ahead) as stream:
        encoding = streams.wide_encoding_of(stream.peek(streams.LOOKED_AT))
        if encoding:
            encodings.add(encoding)
            # Not cut as bytes: one of a letter's two bytes may look like a line end.
            text = io.TextIOWrapper(stream, encoding, newline="\n")
            yield streams.lines_of(text, "\n", content.maximum_bytes)
        else:
            yield streams.lines_of(stream, b"\n", content.maximum_bytes)


def _parse(
    line: bytes | str, content: streams.Content, where: str, number: int, encodings: set[str]
) -> JsonRecord | Fault:
    try:
        record = _load_json(line, content, encodings)
    except UnicodeDecodeError as error:
        return streams.not_utf8(content, where, error)
    except ValueError as error:
        return Fault("not_json", f"{content.file.shown}, {where}: not valid JSON ({error}).")
    return record, where, number


def _load_json(encoded: bytes | str, content: streams.Content, encodings: set[str]) -> Any:
    """What JSON says in whichever encoding; one that is not UTF-8 is noted among the encodings.

    Raises:
        UnicodeDecodeError: there is no telling the encoding.
        ValueError: it is no JSON, or too deep.
    """
    try:
        try:
            return json.loads(encoded)
        except UnicodeDecodeError:
            assert isinstance(encoded, bytes)
            text, encoding = streams.decode(encoded, content.source.encoding)
            encodings.update([encoding] if encoding else [])
            return json.loads(text)
    except RecursionError as error:
        raise ValueError("its values lie too deep within one another") from error


def _holds_lines(content: streams.Content) -> bool:
    """Whether a `.json` file has an object on its first line, so that it is read line by line.

    An export that is one object on one line is read as a whole.
    """
    with _json_lines(content, set(), ahead=True) as lines:
        some = (line for line in lines if isinstance(line, streams.OverlongLine) or line.strip())
        # A file without a line has no rows.
        first, second = next(some, b"{}"), next(some, None)
    if isinstance(first, streams.OverlongLine):
        return False
    try:
        record = _load_json(first, content, set())
    except ValueError:
        return False
    wraps = _wrapped_rows(record, content.source) is not None
    return isinstance(record, dict) and (second is not None or not wraps)


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


def _read_whole_json(content: streams.Content) -> Iterator[JsonRecord | Fault]:
    with content.open() as stream:
        beginning = stream.read(WHOLE_JSON_BYTES + 1)
        if len(beginning) > WHOLE_JSON_BYTES:
            raise streams.BadFile(
                f"{content.file.shown} is one JSON value of over {WHOLE_JSON_BYTES / 1e6:,.0f} MB. "
                "Make it JSON lines, which are read one by one: jq -c '.[]' file.json > file.jsonl"
            )
        # JSON's own reader decodes UTF-16 and UTF-32, but does not report it.
        encodings = {encoding for encoding in [streams.wide_encoding_of(beginning)] if encoding}
        try:
            records = _load_json(beginning, content, encodings)
        except UnicodeDecodeError:
            raise
        except ValueError as error:
            raise streams.BadFile(f"{content.file.shown} is not valid JSON ({error}).") from error
    yield from (streams.decoded(content, encoding) for encoding in encodings)
    wrapped = _wrapped_rows(records, content.source)
    rows = wrapped or (records if isinstance(records, list) else [records])
    for number, record in enumerate(rows, start=1):
        yield record, f"element {number}", number


def read_csv(content: streams.Content) -> Iterator[Document | Fault]:
    """The rows of a table with a line of column names."""
    # Python's own limit, 128 KiB a field, would refuse longer texts.
    csv.field_size_limit(min(content.maximum_bytes, sys.maxsize))
    encoding = _other_encoding(content)
    if encoding:
        yield streams.decoded(content, encoding)
    with content.open() as stream:
        # A file of no bytes is empty, not damaged.
        if not stream.peek(1):
            return
        text = io.TextIOWrapper(stream, encoding=encoding or "utf-8-sig", newline="")
        try:
            plain = _has_plain_quotes(content, encoding)
            ended: list[bool] = []
            rows = table_rows(_until_the_end(text, ended), plain)
            names = list(rows.fieldnames or [])
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
                    yield pick(record, content, f"row {number}", number)
        except csv.Error as error:
            raise streams.BadFile(
                f"{content.file.shown} is not a readable table ({error}). Repair the file, or, if "
                "a field is meant to be so long, raise `maximum_document_megabytes` of the source."
            ) from error


def _until_the_end(text: TextIO, ended: list[bool]) -> Iterator[str]:
    yield from text
    ended.append(True)


def _open_quote(content: streams.Content, where: str) -> streams.BadFile:
    return streams.BadFile(
        f"{content.file.shown}, {where}: a field begins with a double quote that nothing closes, "
        "so that all lines after it would be its text. Close the quote, or, where it is part of "
        "the text, write it twice and put the field in quotes."
    )


def _has_plain_quotes(content: streams.Content, encoding: str | None) -> bool:
    """Whether double quotes are ordinary characters, as they often are in tables separated by tabs:
    read as a table of quoted fields, such a file has errors."""
    with content.open(ahead=True) as stream:
        text = io.TextIOWrapper(stream, encoding=encoding or "utf-8-sig", newline="")
        head = next(text, "")
        if _separator(head) != "\t":
            return False
        try:
            deque(csv.reader(chain([head], text), delimiter="\t", strict=True), maxlen=0)
        except csv.Error as error:
            # A field that is too long is an error in any case, and named as such.
            return "field larger" not in str(error)
    return False


def _separator(head: str) -> str:
    """What separates the columns' names in a table's first line.

    Spreadsheets write semicolons where the comma is the decimal point. A single column has no
    separator, so its text may hold any of these.
    """
    unquoted = re.sub(r'"[^"]*"?', "", head)
    # A head without any of these gets the first one, which no text has.
    return max("\x1f\t,;", key=unquoted.count)


def table_rows(text: Iterable[str], plain_quotes: bool = False) -> "csv.DictReader[str]":
    """The rows of a table, given by its lines; fields beyond its columns are under None.

    Args:
        plain_quotes: whether quotes are characters like others.
    """
    lines = iter(text)
    head = next(lines, "")
    rest = chain([head], lines) if head else lines
    separator = _separator(head)
    if plain_quotes:
        return csv.DictReader(rest, delimiter=separator, quoting=csv.QUOTE_NONE)
    return csv.DictReader(rest, delimiter=separator)


def _other_encoding(content: streams.Content) -> str | None:
    """The encoding of a table that is not UTF-8, by the first place that shows it; raises BadFile
    where there is no telling."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_ascii = True
    with content.open(ahead=True) as stream:
        if encoding := streams.wide_encoding_of(stream.peek(streams.LOOKED_AT)):
            return encoding
        while block := stream.read(streams.BLOCK_BYTES):
            try:
                is_ascii = decoder.decode(block).isascii() and is_ascii
            except UnicodeDecodeError as error:
                # Where letters were UTF-8 before, a byte of this one is damaged.
                if not is_ascii or streams.is_damaged_utf_8(error.object):
                    raise
                return content.source.encoding or streams.decode(error.object)[1]
    return None


def read_parquet(content: streams.Content) -> Iterator[Document | Fault]:
    """The rows of a Parquet file; checksums of its pages are compared where it has them."""
    source = content.source
    number = 0
    with content.open() as stream:
        # A file of no bytes is empty, not damaged.
        if not stream.peek(1):
            return
        schema = pq.ParquetFile(stream).schema_arrow
        _need_columns(content, schema.names)
        columns = [c for c in source.columns if _has(schema.names, c) or not source.templates]
        # Alpaca's optional column, which no setting names.
        columns += ["input"] if source.examples else []
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
                    yield streams.not_utf8(content, where, record)
                else:
                    yield pick(record, content, where, number)


def count_rows(content: streams.Content) -> int:
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
    for place in range(batch.num_rows):
        try:
            yield {name: batch[name][place].as_py() for name in batch.schema.names}
        except UnicodeDecodeError as error:
            yield error


def _need_columns(content: streams.Content, names: Iterable[str]) -> None:
    present, source = list(names), content.source
    choices = [template_columns(template) for template in source.templates] or [source.columns]
    if any(all(_has(present, column) for column in choice) for choice in choices):
        choices = [(source.id_column,)] if source.id_column else []
    for column in choices[0] if choices else ():
        if not _has(present, column):
            raise streams.BadFile(
                f"{content.file.shown} has no column {column!r}; its columns are "
                f"{', '.join(present) or 'none'}. Name the columns in the source's settings, or "
                f"take {content.file.format.name!r} out of `formats` of the source."
            )


def _has(names: list[str], column: str) -> bool:
    return column in names or column.split(".")[0] in names


def pick(record: Any, content: streams.Content, where: str, number: int) -> Document | Fault:
    """The document of a record, or what is wrong with it."""
    source, look = content.source, partial(value_at, record)
    place = f"{content.file.shown}, {where}"
    if source.examples:
        text: Any = take_example(look, source.examples, place)
        if isinstance(text, Fault):
            return text
    elif source.templates:
        text = fill_template(source.templates, look)
    else:
        text = look(source.text_column)
    if not isinstance(text, str):
        return Fault("no_text", f"{place}: {_no_text(record, text, source)}")
    if len(text) > content.maximum_bytes:
        return streams.too_large(content, where, len(text))
    identifier: Any = f"{content.file.name}:{number}"
    if source.id_column is not None:
        identifier = look(source.id_column)
        if identifier is None:
            return Fault("no_id", f"{place}: no id under the key {source.id_column!r}.")
        is_told = isinstance(identifier, str | int | float) and not isinstance(identifier, bool)
        if not is_told or identifier == "":
            kind = _kind(identifier)
            return Fault("bad_id", f"{place}: the id is {kind}, not text or a number.")
    if source.examples:
        return of_example(str(identifier), text, source.name, place, content.file.name)
    return content.document(str(identifier), text, where)


def fill_template(templates: tuple[str, ...], look: Callable[..., Any]) -> str | None:
    """A row's text by a template; None where it has nothing under the columns of any.

    Lists are joined; a line with columns is left out if nothing is under them.
    """
    # Templates whose columns the row has come first, in the order given.
    ordered = sorted(
        templates,
        key=lambda template: any(look(c, _MISSING) is _MISSING for c in template_columns(template)),
    )
    return next(filter(None, (_fill(template, look) for template in ordered)), None)


_MISSING = object()


def _fill(template: str, look: Look) -> str | None:
    lines, is_empty = [], True
    for line in template.splitlines():
        values = {column: _as_text(look(column)) for column in template_columns(line)}
        if values and not any(values.values()):
            continue
        is_empty = is_empty and not values
        parts = Formatter().parse(line)
        lines.append("".join(before + values.get(column or "", "") for before, column, *_ in parts))
    return None if is_empty else "\n".join(lines)


_TOLD = (str, int, float, Decimal, date, time, timedelta, UUID)
"""Types of values that a text can state, of Parquet's columns, too."""


def _as_text(value: Any) -> str:
    """A value within a text; what is no text, number, time, UUID or list of them is none."""
    if isinstance(value, list):
        return "\n".join(filter(None, map(_as_text, value)))
    return str(value).strip() if isinstance(value, _TOLD) and not isinstance(value, bool) else ""


def _no_text(record: Any, value: Any, source: Files) -> str:
    key = source.text_column
    if source.templates:
        return f"nothing under {', '.join(source.columns)}."
    if not isinstance(record, dict):
        return f"{_kind(record)}, where an object with the key {key!r} belongs."
    if value is not None or key in record:
        return f"no text under the key {key!r}, but {_kind(value)}."
    keys = ", ".join(map(str, list(record)[:12]))
    return (
        f"no text under the key {key!r} (found: {keys}). "
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
    matching = (name for kind, name in kinds.items() if isinstance(value, kind))
    return next(matching, f"of the type {type(value).__name__}")


FILE_BYTES = 512 * 1024 * 1024
"""Largest PDF or Word file, pictures included; it is read into memory as a whole."""
PLAIN = ("text", "code", "html", "subtitles", "xml")
"""Formats whose files are hardly larger than their text."""
ZIPPED = ("docx", "odt", "pptx", "xlsx", "epub")

Extract = Callable[[bytes, str | None], tuple[str, str | None]]
"""Maps a file's content and the encoding that the source declares to the text and its encoding,
which is None for UTF-8, or if the file names it. Raises UnicodeDecodeError."""


def naming_encoding(text_of: Callable[[bytes], str]) -> Extract:
    """The extractor of a format whose files name their encoding."""
    return lambda content, _: (text_of(content), None)


def read_pdf(content: streams.Content) -> Iterator[Document | Fault]:
    """A PDF's text layer, page by page."""
    for document in one_document(content, naming_encoding(_pdf_text)):
        if isinstance(document, Fault) or document.text.strip():
            yield document
        else:
            yield Fault(
                "no_text_layer",
                f"{content.file.shown} has no text, pictures at most. Where it is a scan, have "
                "it recognized, for example with: ocrmypdf in.pdf out.pdf",
            )


def one_document(content: streams.Content, extract: Extract) -> Iterator[Document | Fault]:
    """A file whose whole text is one document, or what is wrong with it.

    Raises:
        BadFile: the extractor stumbles over it.
        UserError: the extractor's library is not installed.
    """
    form = content.file.format.name
    maximum = content.maximum_bytes if form in PLAIN else FILE_BYTES
    with content.open() as stream:
        raw = stream.read(maximum + 1)
        # How much more there is, for the message.
        rest = sum(len(block) for block in iter(lambda: stream.read(streams.BLOCK_BYTES), b""))
    if len(raw) > maximum:
        yield streams.too_large(content, "the file", len(raw) + rest)
        return
    try:
        # These formats are zip archives, and any of them may be a compression bomb.
        if form in ZIPPED and zipfile.is_zipfile(io.BytesIO(raw)):
            with zipfile.ZipFile(io.BytesIO(raw)) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > content.maximum_unpacked:
                raise ValueError(f"it unpacks to {size / 1e6:,.0f} MB, see `maximum_expansion`")
        text, encoding = extract(raw, content.source.encoding) if raw.strip() else ("", None)
    except UnicodeDecodeError as error:
        yield streams.not_utf8(content, "the file", error)
    except MemoryError:
        # The machine's lack of memory is no fault of the file.
        raise
    except ModuleNotFoundError as error:
        # No fault of the file, which would be set aside and missed.
        raise UserError(install_advice(error.name or "") or str(error)) from error
    except Exception as error:
        # Extractors meet any file at all, and raise whatever they stumble over.
        reason = first_line(error)
        raise streams.BadFile(
            f"{content.file.shown} cannot be read as {form} ({reason}). "
            "Fetch the file again, or take it out of the source."
        ) from error
    else:
        if encoding:
            yield streams.decoded(content, encoding)
        if len(text) > content.maximum_bytes:
            yield streams.too_large(content, "the text", len(text))
        else:
            yield content.document(content.file.name, text)


_DECLARED = re.compile(rb"<meta[^>]+charset|<\?xml[^>]+encoding", re.IGNORECASE)


def page_text(content: bytes, declared: str | None) -> tuple[str, str | None]:
    """A page's text, and the encoding that it is in if it does not say so (`Extract`)."""
    # trafilatura would guess the encoding, and is often wrong.
    if _DECLARED.search(content[:8192]):
        return html_text(content), None
    page, encoding = streams.decode(content, declared)
    return html_text(page if encoding else content), encoding


def html_text(content: bytes | str) -> str:
    """A page's main text, as trafilatura finds it; where it finds none, all its text."""
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    # Without that tag, trafilatura finds nothing in a page that has no head.
    markup = f"<html>{content}" if isinstance(content, str) else b"<html>" + content
    for page in (content, markup):
        text = trafilatura.extract(
            page, output_format="markdown", include_comments=False, include_tables=True
        )
        if text := text or trafilatura.html2txt(page):
            return str(text)
    return ""


def _pdf_text(content: bytes) -> str:
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    reader = pypdf.PdfReader(io.BytesIO(content))
    # An empty password opens files whose encryption only restricts what may be done with them.
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it is encrypted; save it without its password")
    return "\n\n".join(page.extract_text().strip() for page in reader.pages)


def notebook_text(content: bytes) -> str:
    """A Jupyter notebook's text, and its code between fences; outputs are left out."""
    notebook = json.loads(content)
    cells = notebook.get("cells")
    if cells is None:
        # Before version 4, cells lay in worksheets.
        cells = [cell for sheet in notebook["worksheets"] for cell in sheet["cells"]]
    language = notebook.get("metadata", {}).get("language_info", {}).get("name", "python")
    return "\n\n".join(filter(None, (_cell(cell, language) for cell in cells)))


def _cell(cell: dict[str, Any], language: str) -> str:
    lines = cell.get("source", cell.get("input", ""))
    text = "".join(lines).strip()
    if cell.get("cell_type") == "code" and text:
        return f"```{language}\n{text}\n```"
    return text
