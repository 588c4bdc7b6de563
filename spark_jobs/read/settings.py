"""What the raw corpus is made of."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from artifacts.examples import Form
from artifacts.settings import Settings
from spark_jobs.read.example_settings import ExampleColumns
from spark_jobs.read.formats import FORMATS, FormatName

TABLE = r"^[A-Za-z0-9_-]+\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+$"
COLUMN = r"^[A-Za-z_][A-Za-z0-9_]{0,299}$"
GIB = 2**30
SELECT = re.compile(r"^\s*(select|with)\b", re.IGNORECASE)


class PackageDocs(Settings):
    """The docstrings of Python packages installed in this environment, read without importing."""

    type: Literal["package_docs"]
    """Which kind of source this is."""
    name: str = "package_docs"
    """The source's name; every document carries it."""
    packages: list[str] = Field(min_length=1)
    """Top-level import names, such as `numpy`; each must be installed."""
    minimum_characters: int = Field(default=200, ge=1)
    """Shortest docstring taken, in characters; below 200 most are one-line signatures."""


class Files(Settings):
    """Files of text, of many formats, each also compressed (`.gz`, `.zst`, `.bz2`, `.xz`)."""

    type: Literal["files"]
    """Which kind of source this is."""
    name: str = "files"
    """The source's name; every document carries it."""
    path: str
    """A file, a folder (read with its subfolders) or a glob, local or `gs://`, also with braces:
    `name.{1..128}-of-128.jsonl.gz`."""
    text_column: str = "text"
    """The column or JSON key that holds the text; unused for plain text files."""
    examples: ExampleColumns | None = None
    """The columns of examples to learn a task from, in place of a text column."""
    id_column: str | None = None
    """The column or JSON key that holds the document's id; without one, the file and row are it."""
    pin: bool = False
    """Whether files of Parquet or JSON lines (`.jsonl`, `.ndjson`, not compressed) stay where they
    lie, and the corpus holds their names, generations and checksums in place of a copy: for text in
    a bucket that is too large to copy. Cleaning reads them there, and names one that has changed
    since. What is wrong with a row is fatal then, but for a text that is null, which is counted as
    empty."""
    maximum_faulty_share: float = Field(default=0.01, ge=0, le=1)
    """Share of documents that may be unreadable; they are set aside and counted, more is fatal."""
    formats: tuple[FormatName, ...] = tuple(name for name in FORMATS if name != "code")
    """What is read: `text` (also Markdown, reStructuredText), `html`, `pdf`, `docx`, `notebook`,
    `json` (one object a line, or a list of them), `csv` (also `.tsv`), `parquet`, `archive` (zip
    and tar) and, if named here, `code`. Files of any other format are counted and named."""
    on_bad_file: Literal["stop", "quarantine"] = "stop"
    """What happens when a file as a whole cannot be read, being damaged, encrypted or not
    permitted: the run stops, or the file is left out, named and counted."""
    hidden: bool = False
    """Whether files and folders whose names begin with a dot are read."""
    follow_links: bool = False
    """Whether links to files outside the folder are read; links to folders never are."""
    maximum_document_megabytes: float = Field(default=64, gt=0, le=1024)
    """Largest document, in megabytes of text; a larger one is set aside and counted."""
    maximum_expansion: float = Field(default=200, gt=1)
    """Times its compressed size that a file may unpack to; more is taken for a compression bomb."""

    @model_validator(mode="after")
    def _pins_text_alone(self) -> Self:
        if self.pin and self.examples:
            raise ValueError(f"{self.name} has `pin` and `examples`; examples are always copied")
        return self

    @model_validator(mode="after")
    def _refuse_pickles(self) -> Self:
        if self.path.endswith((".pkl", ".pickle")):
            raise ValueError(
                f"{self.path} is a pickle, which can run code and is never read; where you trust "
                'it, convert it: python -c "import pandas; pandas.read_pickle('
                "'data.pkl').to_json('data.jsonl', orient='records', lines=True)\""
            )
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return _columns(self)


class HuggingFaceDataset(Settings):
    """A Hugging Face dataset."""

    type: Literal["hugging_face"]
    """Which kind of source this is."""
    name: str = "hugging_face"
    """The source's name; every document carries it."""
    dataset: str
    """Its name on the Hub, or a local folder. Where HF_HUB_OFFLINE is set, the copy in the Hub's
    cache is read."""
    subset: str | None = None
    """The dataset's subset (its configuration name), where it has several."""
    split: str = "train"
    """Which split is read."""
    revision: str | None = None
    """A Git revision of the dataset on the Hub; by default its newest."""
    text_column: str = "text"
    """The column that holds the text."""
    examples: ExampleColumns | None = None
    """The columns of examples to learn a task from, in place of a text column."""
    id_column: str | None = None
    """The column that holds the document's id; without one, the row number is it."""
    maximum_faulty_share: float = Field(default=0.01, ge=0, le=1)
    """Share of documents that may lack text; they are set aside and counted, more is fatal."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return _columns(self)


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


def _columns(source: Files | HuggingFaceDataset) -> tuple[str, ...]:
    named = source.examples.columns if source.examples else (source.text_column,)
    return (*named, source.id_column) if source.id_column else named


Source = Annotated[PackageDocs | Files | HuggingFaceDataset | BigQuery, Field(discriminator="type")]

PLACES = {"path", "dataset", "export", "project", "location", "maximum_gigabytes_billed"}
"""Settings of sources that say where text is read or at what price, not what is read."""


class RawCorpusSettings(Settings):
    """The sources of the pinned snapshot of source text."""

    sources: list[Source] = Field(min_length=1)
    """One or more named sources, read in this order."""

    @model_validator(mode="after")
    def _names_are_unique(self) -> "RawCorpusSettings":
        names = [source.name for source in self.sources]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"two sources are named {', '.join(repeated)}; give each its own name")
        return self

    @property
    def forms(self) -> dict[str, Form]:
        """Source name to the form of what it holds."""
        found: dict[str, Form] = {}
        for source in self.sources:
            columns = getattr(source, "examples", None)
            found[source.name] = columns.form if columns else "pretraining"
        return found

    def content(self) -> dict[str, Any]:
        """What decides the snapshot besides the sources' fingerprints: paths are left out."""
        return {"sources": list(map(content_of, self.sources))}


def content_of(source: Source) -> dict[str, Any]:
    """The settings of a source that decide what is read of it."""
    found = source.model_dump(mode="json", exclude=PLACES)
    if not found.get("pin"):
        # What was made before there were pins, and copies, is what it was.
        found.pop("pin", None)
    return found
