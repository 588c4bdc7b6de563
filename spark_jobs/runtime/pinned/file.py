"""Files as a source listed them; those that a raw corpus pins, and how their change is noticed."""

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from artifacts.errors import UserError, make_command
from artifacts.storage import versions


class Stretch(NamedTuple):
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
    """Of this content (`artifacts.storage.versions`); in Cloud Storage, the object's own."""
    checksum: str


class PinnedFile(ListedFile):
    """A Parquet or JSON lines file of a source, as it was when the raw corpus was made."""

    source: str
    text_column: str
    id_column: str | None
    """None: the name and the number of the row or line are a document's id."""
    row_groups: list[int] = Field(default_factory=list)
    """Of Parquet, the rows of each."""
    stretches: list[Stretch] = Field(default_factory=list)
    """Of JSON lines, from the first byte to the last."""

    @property
    def rows(self) -> int:
        """Of the whole file."""
        return sum(self.row_groups) + sum(one.rows for one in self.stretches)

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
