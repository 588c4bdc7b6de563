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
"""What a row says, its place and its number."""


def read_json(content: streams.Content) -> Iterator[Document | Fault]:
    """The rows of JSON lines, or of a file that is one list or one object."""
    for found in json_records(content):
        yield found if isinstance(found, Fault) else pick(found[0], content, *found[1:])


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
            # Bytes cannot be cut into lines: one of the two of a letter may look like an end.
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


def _load_json(found: bytes | str, content: streams.Content, encodings: set[str]) -> Any:
    """What JSON says in whichever encoding; one that is not UTF-8 is noted among the encodings.

    Raises:
        UnicodeDecodeError: there is no telling the encoding.
        ValueError: it is no JSON, or too deep.
    """
    try:
        try:
            return json.loads(found)
        except UnicodeDecodeError:
            assert isinstance(found, bytes)
            text, encoding = streams.decode(found, content.source.encoding)
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
    if not isinstance(value, dict) or all(value_at(value, one) for one in source.columns):
        return None
    lists = [
        found
        for found in value.values()
        if isinstance(found, list) and found and all(isinstance(row, dict) for row in found)
    ]
    says = any(isinstance(v, str) and count_words(v) >= PROSE_WORDS for v in value.values())
    return lists[0] if len(lists) == 1 and not says else None


def _read_whole_json(content: streams.Content) -> Iterator[JsonRecord | Fault]:
    with content.open() as stream:
        found = stream.read(WHOLE_JSON_BYTES + 1)
        if len(found) > WHOLE_JSON_BYTES:
            raise streams.BadFile(
                f"{content.file.shown} is one JSON value of over {WHOLE_JSON_BYTES / 1e6:,.0f} MB. "
                "Make it JSON lines, which are read one by one: jq -c '.[]' file.json > file.jsonl"
            )
        # JSON's own reader knows UTF-16 and UTF-32, and tells nobody.
        encodings = {encoding for encoding in [streams.wide_encoding_of(found)] if encoding}
        try:
            records = _load_json(found, content, encodings)
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
    csv.field_size_limit(min(content.maximum_bytes, sys.maxsize))
    encoding = _other_encoding(content)
    if encoding:
        yield streams.decoded(content, encoding)
    with content.open() as stream:
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
                # A row ends with its line, and no other is asked for.
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
    """Whether a double quote is a character like any other, which in tables separated by tabs it
    often is: there, none lies as it would if fields were quoted."""
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

    Spreadsheets write semicolons where the comma is the decimal point. A single column is separated
    from none, so its text may hold each of these.
    """
    unquoted = re.sub(r'"[^"]*"?', "", head)
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
        if not stream.peek(1):
            return
        schema = pq.ParquetFile(stream).schema_arrow
        _need_columns(content, schema.names)
        columns = [c for c in source.columns if _has(schema.names, c) or not source.templates]
        columns += ["input"] if source.examples else []
        # Of a list or an object, Arrow has no column of that name, and each row is named.
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
    """As many rows as have some megabytes in those columns."""
    outermost = {column.split(".")[0] for column in columns}
    largest = 1
    for number in range(parquet.metadata.num_row_groups):
        row_group = parquet.metadata.row_group(number)
        stored = map(row_group.column, range(row_group.num_columns))
        read = (one for one in stored if one.path_in_schema.split(".")[0] in outermost)
        if row_group.num_rows:
            size = sum(one.total_uncompressed_size for one in read)
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
    found, source = list(names), content.source
    wanted = [template_columns(one) for one in source.templates] or [source.columns]
    if any(all(_has(found, column) for column in one) for one in wanted):
        wanted = [(source.id_column,)] if source.id_column else []
    for column in wanted[0] if wanted else ():
        if not _has(found, column):
            raise streams.BadFile(
                f"{content.file.shown} has no column {column!r}; its columns are "
                f"{', '.join(found) or 'none'}. Name the columns in the source's settings, or take "
                f"{content.file.format.name!r} out of `formats` of the source."
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

    Lists are joined; a line is left out where it has columns and nothing is under them.
    """
    ordered = sorted(
        templates, key=lambda one: any(look(c, _MISSING) is _MISSING for c in template_columns(one))
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
"""What a value is that a text can tell; of columns of Parquet, too."""


def _as_text(value: Any) -> str:
    """A value within a text; what is no text, number, time, UUID or list of them is none."""
    if isinstance(value, list):
        return "\n".join(filter(None, map(_as_text, value)))
    return str(value).strip() if isinstance(value, _TOLD) and not isinstance(value, bool) else ""


def _no_text(record: Any, found: Any, source: Files) -> str:
    key = source.text_column
    if source.templates:
        return f"nothing under {', '.join(source.columns)}."
    if not isinstance(record, dict):
        return f"{_kind(record)}, where an object with the key {key!r} belongs."
    if found is not None or key in record:
        return f"no text under the key {key!r}, but {_kind(found)}."
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
    found = (name for kind, name in kinds.items() if isinstance(value, kind))
    return next(found, f"of the type {type(value).__name__}")


FILE_BYTES = 512 * 1024 * 1024
"""Largest PDF or Word file, pictures included; it is read into memory as a whole."""
PLAIN = ("text", "code", "html", "subtitles", "xml")
"""Formats whose files are hardly larger than their text."""
ZIPPED = ("docx", "odt", "pptx", "xlsx", "epub")

Extract = Callable[[bytes, str | None], tuple[str, str | None]]
"""A file's content, and the encoding that the source declares, to the text and the encoding that it
was found in; None where that is UTF-8, or where the file names it. Raises UnicodeDecodeError."""


def naming_encoding(text_of: Callable[[bytes], str]) -> Extract:
    """The extractor of a format that names its encoding."""
    return lambda found, _: (text_of(found), None)


def read_pdf(content: streams.Content) -> Iterator[Document | Fault]:
    """A PDF's text layer, page by page."""
    for one in one_document(content, naming_encoding(_pdf_text)):
        if isinstance(one, Fault) or one.text.strip():
            yield one
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
        found = stream.read(maximum + 1)
        rest = sum(len(block) for block in iter(lambda: stream.read(streams.BLOCK_BYTES), b""))
    if len(found) > maximum:
        yield streams.too_large(content, "the file", len(found) + rest)
        return
    try:
        if form in ZIPPED and zipfile.is_zipfile(io.BytesIO(found)):
            with zipfile.ZipFile(io.BytesIO(found)) as archive:
                size = sum(member.file_size for member in archive.infolist())
            if size > content.maximum_unpacked:
                raise ValueError(f"it unpacks to {size / 1e6:,.0f} MB, see `maximum_expansion`")
        text, encoding = extract(found, content.source.encoding) if found.strip() else ("", None)
    except UnicodeDecodeError as error:
        yield streams.not_utf8(content, "the file", error)
    except MemoryError:
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


def page_text(found: bytes, declared: str | None) -> tuple[str, str | None]:
    """A page's text, and the encoding that it is in if it does not say so (`Extract`)."""
    # trafilatura would guess the encoding, and often take another one.
    if _DECLARED.search(found[:8192]):
        return html_text(found), None
    page, encoding = streams.decode(found, declared)
    return html_text(page if encoding else found), encoding


def html_text(found: bytes | str) -> str:
    """A page's main text, as trafilatura finds it; where it finds none, all its text."""
    import trafilatura

    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    # Without that tag, trafilatura takes what has no head for something else, and finds nothing.
    begun = f"<html>{found}" if isinstance(found, str) else b"<html>" + found
    for page in (found, begun):
        text = trafilatura.extract(
            page, output_format="markdown", include_comments=False, include_tables=True
        )
        if text := text or trafilatura.html2txt(page):
            return str(text)
    return ""


def _pdf_text(found: bytes) -> str:
    import pypdf

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    reader = pypdf.PdfReader(io.BytesIO(found))
    if reader.is_encrypted and not reader.decrypt(""):
        raise ValueError("it is encrypted; save it without its password")
    return "\n\n".join(page.extract_text().strip() for page in reader.pages)


def notebook_text(found: bytes) -> str:
    """A Jupyter notebook's text, and its code between fences; outputs are left out."""
    notebook = json.loads(found)
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
