"""Parts of pinned files: row groups of Parquet, stretches of JSON lines."""

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from artifacts.document_ids import find_id_fault
from artifacts.errors import UserError
from artifacts.shown import shown_in_line
from artifacts.storage import files
from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.pinned.file import PinnedFile
from spark_jobs.runtime.pinned.lines import read_line


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
