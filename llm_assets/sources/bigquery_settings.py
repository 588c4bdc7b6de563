"""What a BigQuery source is."""

import re
from typing import Literal

from pydantic import Field, field_validator, model_validator

from artifacts.settings import Settings

TABLE = r"^[A-Za-z0-9_-]+\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+$"
COLUMN = r"^[A-Za-z_][A-Za-z0-9_]{0,299}$"
GIB = 2**30
SELECT = re.compile(r"^\s*(select|with)\b", re.IGNORECASE)


class BigQuery(Settings):
    """A BigQuery table or query, exported to Parquet in the bucket as a pinned snapshot."""

    type: Literal["bigquery"]
    """Which kind of source this is."""
    name: str = Field(default="bigquery", pattern=r"^[a-z][a-z0-9_]*$")
    """The source's name; every document carries it."""
    table: str | None = Field(default=None, pattern=TABLE)
    """`project.dataset.table`; either this or `query`."""
    query: str | None = None
    """One SELECT statement that gives the id and text columns."""
    id_column: str = Field(default="id", pattern=COLUMN)
    """The column that identifies a document."""
    text_column: str = Field(default="text", pattern=COLUMN)
    """The column that holds the text."""
    watermark_column: str | None = Field(default=None, pattern=COLUMN)
    """A column that grows when rows are added or changed, such as `ingested_at`. With the number of
    rows it tells whether the text changed; without it, when the table was last modified does."""
    export: str = Field(pattern=r"^gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[\w.=@+/-]*)?$")
    """Folder in Cloud Storage for the exported Parquet files; letters, digits and `._=@+-`."""
    pin: bool = False
    """Whether the exported files are the corpus where they lie, in place of a copy: for tables that
    are too large to copy."""
    project: str
    """The project that runs and pays for the BigQuery jobs."""
    location: str = "US"
    """Where the dataset is."""
    maximum_gigabytes_billed: float = Field(default=100.0, gt=0)
    """A job that would read more gigabytes than this is refused before it costs anything."""

    @field_validator("query")
    @classmethod
    def _is_one_select(cls, query: str | None) -> str | None:
        if query is None:
            return None
        stripped = query.strip().rstrip(";")
        if not SELECT.match(stripped) or ";" in stripped:
            raise ValueError("only one SELECT statement (or WITH ... SELECT) is allowed")
        return stripped

    @model_validator(mode="after")
    def _has_one_origin(self) -> "BigQuery":
        if (self.table is None) == (self.query is None):
            raise ValueError("give either `table` or `query`")
        return self

    @property
    def origin(self) -> str:
        """The table or the query as a FROM clause takes it."""
        return f"`{self.table}`" if self.table else f"({self.query})"

    @property
    def maximum_bytes_billed(self) -> int:
        """The limit as BigQuery takes it."""
        return round(self.maximum_gigabytes_billed * GIB)
