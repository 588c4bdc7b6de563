"""Parts of a raw corpus: in its folder, or pinned, where their source has them."""

import fnmatch
import hashlib
import itertools
from dataclasses import dataclass
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from artifacts.document_ids import find_id_fault
from artifacts.errors import UserError, make_command
from artifacts.shown import shown_in_line
from artifacts.storage import files, versions
from spark_jobs.runtime.parquet import PART_NAMES, Part, find_parts

RAW_COLUMNS = ["id", "text", "source"]
"""That every raw corpus has."""
PINNED_NAME = "pinned.jsonl"
"""Of the list of pinned files in a raw corpus, a line each."""


class PinnedFile(BaseModel):
    """A Parquet file of a source, as it was when the raw corpus was made."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str
    name: str
    """Relative to the source's folder."""
    bytes: int
    """As stored."""
    generation: str
    """Of this content (`artifacts.storage.versions`); in Cloud Storage, the object's own."""
    checksum: str
    source: str
    text_column: str
    id_column: str | None
    """None: the name and the number of the row are a document's id."""
    row_groups: list[int]
    """Rows of each."""

    def find_change(self) -> str | None:
        """What became of the file, in words; None where it holds what it held."""
        try:
            if versions.generation_of(self.url) == self.generation:
                return None
            if versions.checksum_of(self.url) == self.checksum:
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

    def _refuse(self, what: str) -> NoReturn:
        raise UserError(
            f"{self.url}, which the raw corpus pins (generation {self.generation}), {what}. Put "
            f"that content back, or take what is there now: {make_command('raw_corpus')}"
        )


@dataclass(frozen=True, kw_only=True)
class PinnedPart(Part):
    """One row group of a pinned file."""

    file: PinnedFile
    first_row: int
    """Of the file."""

    def read(self, columns: list[str]) -> pa.Table:
        """Of `id`, `text` and `source` those asked for.

        Raises:
            UserError: the file has changed, is damaged, or a row's id cannot be used.
        """
        try:
            rows = self._rows("text" in columns)
            self.file.refuse_change()
        except (pa.ArrowInvalid, OSError) as error:
            self.file.refuse_change()
            raise UserError(
                f"{self.url}, row group {self.row_group}, cannot be read ({error}). Write the file "
                "again, or have it copied without what is damaged: `pin: false` and `on_bad_file`."
            ) from error
        found = {
            "id": pa.array(self._ids(rows), pa.string()),
            "source": pa.array([self.file.source] * self.rows, pa.string()),
        }
        if "text" in columns:
            found["text"] = rows[self.file.text_column]
        return pa.table({name: found[name] for name in columns if name in found})

    def digest(self, columns: list[str]) -> str:
        """A hash of all that decides the rows; the file is not read for it."""
        file = self.file
        named = file.id_column or f"{file.name}:{self.first_row}"
        decides = [file.checksum, self.row_group, file.text_column, named, file.source, columns]
        return hashlib.blake2b(repr(decides).encode(), digest_size=16).hexdigest()

    def _rows(self, with_text: bool) -> pa.Table:
        columns = [self.file.id_column, self.file.text_column if with_text else None]
        columns = [name for name in columns if name]
        with files.open_file(self.url) as opened:
            parquet = pq.ParquetFile(opened, page_checksum_verification=True)
            rows = parquet.read_row_group(self.row_group, columns=columns)
        if not with_text:
            return rows
        text = rows[self.file.text_column].cast(pa.string())
        text.validate(full=True)
        place = rows.schema.get_field_index(self.file.text_column)
        return rows.set_column(place, self.file.text_column, text)

    def _ids(self, rows: pa.Table) -> list[str]:
        if self.file.id_column is None:
            first = self.first_row + 1
            return [f"{self.file.name}:{n}" for n in range(first, first + self.rows)]
        ids: list[str] = pc.cast(rows[self.file.id_column], pa.string()).to_pylist()
        for number, identifier in enumerate(ids):
            fault = "is null" if identifier is None else find_id_fault(identifier)
            if fault:
                raise UserError(
                    f"{self.url}, row {self.first_row + number + 1}: the id "
                    f"'{shown_in_line((identifier or '')[:80])}' {fault}. Mend it, or have such "
                    "rows set aside and counted: `pin: false`."
                )
        return ids


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


def parts_of(file: PinnedFile) -> list[Part]:
    """The row groups of a pinned file that have rows."""
    firsts = [0, *itertools.accumulate(file.row_groups)]
    return [
        PinnedPart(file.url, number, rows, file=file, first_row=firsts[number])
        for number, rows in enumerate(file.row_groups)
        if rows
    ]
