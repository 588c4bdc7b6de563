"""Parts of a raw corpus: in its folder, or pinned, where their source has them.

A pinned file stays where its source has it: its parts are row groups of Parquet, or stretches of
JSON lines. That it has changed is noticed before any of it is used.
"""

import fnmatch
import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field

from artifacts.errors import UserError, has_control_characters, make_command, shown_in_line
from artifacts.settings import value_at, with_whole_characters
from artifacts.storage import files, transfer
from spark_jobs.runtime.parquet import PART_NAMES, Part, find_parts

MOST_ID_BYTES = 1_024


def find_id_fault(identifier: str) -> str | None:
    """What is wrong with an id, in words that follow it; None where nothing is."""
    if has_control_characters(identifier):
        return "holds control characters or half a surrogate pair"
    if not identifier.strip():
        return "is empty"
    if len(identifier.encode()) > MOST_ID_BYTES:
        return f"has more than {MOST_ID_BYTES:,} bytes"
    return None


class LineRange(NamedTuple):
    """Whole lines of a file, one after another."""

    bytes: int
    lines: int
    rows: int
    """Lines that are not blank."""


class ListedFile(BaseModel):
    """A file of a source, as it was when the source was listed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    name: str
    """Relative to the source's folder."""
    bytes: int
    """As stored."""
    generation: str
    """Of this content (`artifacts.storage.transfer`); in Cloud Storage, the object's own."""
    checksum: str


class PinnedFile(ListedFile):
    """A Parquet or JSON lines file of a source, as it was when the raw corpus was made."""

    source: str
    text_column: str
    id_column: str | None
    """None: the name and the number of the row or line are a document's id."""
    row_groups: list[int] = Field(default_factory=list)
    """Of Parquet, the rows of each."""
    stretches: list[LineRange] = Field(default_factory=list)
    """Of JSON lines, from the first byte to the last."""

    @property
    def rows(self) -> int:
        """Of the whole file."""
        return sum(self.row_groups) + sum(one.rows for one in self.stretches)

    def find_change(self) -> str | None:
        """What became of the file, in words; None where it holds what it held."""
        try:
            if transfer.generation_of(self.url) == self.generation:
                return None
            if transfer.checksum_of(self.url) == self.checksum:
                return None
        except FileNotFoundError:
            return "is no longer there"
        return "has changed since"

    def refuse_change(self) -> None:
        """Raise UserError where the file holds something else now, or is gone."""
        if change := self.find_change():
            raise UserError(
                f"{self.url}, which the raw corpus pins (generation {self.generation}), {change}. "
                "Put that content back, or take what is there now: "
                f"{make_command('raw_corpus')}"
            )


_MISSING = object()


def read_line(file: PinnedFile, line: bytes, number: int) -> tuple[str, str | None]:
    """The id and text of a line, as they are when the file is copied; None is a text that is null.

    Args:
        number: the line's in the file, from 1.

    Raises:
        UserError: the line is no JSON object in UTF-8 with a text and an id.
    """
    try:
        record = json.loads(line)
    except UnicodeDecodeError as error:
        _refuse(file, number, f"byte 0x{error.object[error.start]:02x} is not UTF-8")
    except (ValueError, RecursionError) as error:
        _refuse(file, number, f"not valid JSON ({error})")
    text = value_at(record, file.text_column, _MISSING)
    if not isinstance(text, str | None):
        _refuse(file, number, f"no text under the key {file.text_column!r}")
    identifier = f"{file.name}:{number}"
    if file.id_column is not None:
        found = value_at(record, file.id_column)
        if isinstance(found, bool) or not isinstance(found, str | int | float):
            _refuse(file, number, f"no text or number under the key {file.id_column!r}")
        identifier = str(found)
    if fault := find_id_fault(identifier):
        _refuse(file, number, f"the id '{shown_in_line(identifier[:80])}' {fault}")
    return identifier, None if text is None else with_whole_characters(text)


def _refuse(file: PinnedFile, number: int, what: str) -> NoReturn:
    raise UserError(
        f"{file.url}, line {number}: {what}. Mend it, or have such lines set aside and counted: "
        "`pin: false`."
    )


class Rows(NamedTuple):
    """Documents of a pinned part."""

    ids: list[str]
    texts: pa.Array | pa.ChunkedArray | None
    """None where only the ids were asked for."""


@dataclass(frozen=True, kw_only=True)
class PinnedPart(Part, ABC):
    """Some rows of a pinned file, one after another."""

    file: PinnedFile
    first: int
    """Rows, or lines, of the file before it."""

    @abstractmethod
    def rows_of(self, with_text: bool) -> Rows:
        """The rows; raises UserError as `read`."""

    @abstractmethod
    def place(self) -> list[int | str]:
        """Where in the file it is."""

    def read(self, columns: list[str]) -> pa.Table:
        """Of `id`, `text` and `source` those asked for.

        Raises:
            UserError: the file has changed, is damaged, or a row cannot be used.
        """
        rows = self.rows_of("text" in columns)
        found = {
            "id": pa.array(rows.ids, pa.string()),
            "text": rows.texts,
            "source": pa.array([self.file.source] * self.rows, pa.string()),
        }
        return pa.table({name: found[name] for name in columns if name in found})

    def digest(self, columns: list[str]) -> str:
        """A hash of all that decides the rows; the file is not read for it."""
        file = self.file
        named = file.id_column or f"{file.name}:{self.first}"
        decides = [file.checksum, *self.place(), file.text_column, named, file.source, columns]
        return hashlib.blake2b(repr(decides).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, kw_only=True)
class PinnedRowGroup(PinnedPart):
    """One row group of a Parquet file."""

    def rows_of(self, with_text: bool) -> Rows:
        try:
            table = self._table(with_text)
            self.file.refuse_change()
        except (pa.ArrowInvalid, OSError) as error:
            self.file.refuse_change()
            raise UserError(
                f"{self.url}, row group {self.row_group}, cannot be read ({error}). Write the file "
                "again, or have it copied without what is damaged: `pin: false` and `on_bad_file`."
            ) from error
        return Rows(self._ids(table), table[self.file.text_column] if with_text else None)

    def place(self) -> list[int | str]:
        return [self.row_group]

    def _table(self, with_text: bool) -> pa.Table:
        columns = [self.file.id_column, self.file.text_column if with_text else None]
        columns = [name for name in columns if name]
        with files.open_file(self.url) as opened:
            parquet = pq.ParquetFile(opened, page_checksum_verification=True)
            table = parquet.read_row_group(self.row_group, columns=columns)
        if not with_text:
            return table
        text = table[self.file.text_column].cast(pa.string())
        text.validate(full=True)
        place = table.schema.get_field_index(self.file.text_column)
        return table.set_column(place, self.file.text_column, text)

    def _ids(self, table: pa.Table) -> list[str]:
        if self.file.id_column is None:
            first = self.first + 1
            return [f"{self.file.name}:{n}" for n in range(first, first + self.rows)]
        ids: list[str] = pc.cast(table[self.file.id_column], pa.string()).to_pylist()
        for number, identifier in enumerate(ids):
            fault = "is null" if identifier is None else find_id_fault(identifier)
            if fault:
                raise UserError(
                    f"{self.url}, row {self.first + number + 1}: the id "
                    f"'{shown_in_line((identifier or '')[:80])}' {fault}. Mend it, or have such "
                    "rows set aside and counted: `pin: false`."
                )
        return ids


@dataclass(frozen=True, kw_only=True)
class PinnedLines(PinnedPart):
    """One stretch of a file of JSON lines."""

    start: int
    """Byte of the file."""
    length: int
    """Bytes."""

    def rows_of(self, with_text: bool) -> Rows:
        try:
            content = files.read_range(self.url, self.start, self.length)
        except OSError as error:
            self.file.refuse_change()
            raise UserError(f"{self.url} cannot be read ({error}).") from error
        self.file.refuse_change()
        rows = [
            read_line(self.file, line, number)
            for number, line in enumerate(content.split(b"\n"), start=self.first + 1)
            if line.strip()
        ]
        texts = pa.array([text for _, text in rows], pa.string()) if with_text else None
        return Rows([identifier for identifier, _ in rows], texts)

    def place(self) -> list[int | str]:
        return ["bytes", self.start, self.length]


def parts_of(file: PinnedFile) -> list[Part]:
    """The parts of a pinned file that have rows."""
    return list(itertools.chain(_row_groups(file), _lines(file)))


def _row_groups(file: PinnedFile) -> Iterator[PinnedPart]:
    first = 0
    for number, rows in enumerate(file.row_groups):
        if rows:
            yield PinnedRowGroup(file.url, number, rows, file=file, first=first)
        first += rows


def _lines(file: PinnedFile) -> Iterator[PinnedPart]:
    first = start = 0
    for number, (length, lines, rows) in enumerate(file.stretches):
        if rows:
            yield PinnedLines(
                file.url, number, rows, file=file, first=first, start=start, length=length
            )
        first += lines
        start += length


RAW_COLUMNS = ["id", "text", "source"]
"""That every raw corpus has."""
PINNED_NAME = "pinned.jsonl"
"""Of the list of pinned files in a raw corpus, a line each."""


def find_raw_parts(url: str) -> list[Part]:
    """The parts of a raw corpus, in its folder or where they are pinned, in a fixed order.

    Raises:
        UserError: there are none, or one in the folder is damaged or lacks a column.
    """
    pinned = [part for file in find_pinned(url) for part in parts_of(file)]
    if pinned and not fnmatch.filter(files.list_names(url), PART_NAMES):
        return pinned
    return find_parts(url, RAW_COLUMNS, "raw_corpus") + pinned


def find_pinned(url: str) -> list[PinnedFile]:
    """The files that a raw corpus pins."""
    lines = (files.find(f"{url}/{PINNED_NAME}") or b"").splitlines()
    return [PinnedFile.model_validate_json(line) for line in lines]
