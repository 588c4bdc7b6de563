"""What the raw corpus is made of."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from artifacts.examples import Form
from artifacts.settings import Settings
from llm_assets.sources.bigquery_settings import BigQuery
from llm_assets.sources.example_settings import ExampleColumns
from llm_assets.sources.formats import FORMATS, FormatName


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
