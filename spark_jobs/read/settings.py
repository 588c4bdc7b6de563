"""What the raw corpus is made of: sources, and the columns of their text."""

import re
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from artifacts.errors import has_control_characters
from artifacts.examples import Form
from artifacts.settings import Settings
from artifacts.storage.files import LocalPath, Place
from spark_jobs.read.formats import FORMATS, FormatName


class PairColumns(Settings):
    """A text and the target to write for it, such as a summary."""

    form: Literal["pairs"]
    """The form of the examples."""
    document_column: str = "document"
    """The column or JSON key of the input."""
    summary_column: str = "summary"
    """The column or JSON key of the target."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return (self.document_column, self.summary_column)


class ConversationColumns(Settings):
    """Conversations, or instructions with their answers."""

    form: Literal["conversations"]
    """The form of the examples."""
    layout: Literal["messages", "alpaca", "prompt_answer"] = "messages"
    """`messages`: a list of `{role, content}`; `alpaca`: `instruction`, `output` and, optionally,
    `input`, put into Alpaca's prompt template; `prompt_answer`: two columns."""
    messages_column: str = "messages"
    """The column or JSON key of the list, for `messages`."""
    prompt_column: str = "prompt"
    """The column of the user's turn, for `prompt_answer`."""
    answer_column: str = "answer"
    """The column of the assistant's turn, for `prompt_answer`."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return {
            "messages": (self.messages_column,),
            "alpaca": ("instruction", "output"),
            "prompt_answer": (self.prompt_column, self.answer_column),
        }[self.layout]


class LabeledColumns(Settings):
    """Texts, each with its class."""

    form: Literal["labeled"]
    """The form of the examples."""
    text_column: str = "text"
    """The column or JSON key of the text."""
    label_column: str = "label"
    """The column or JSON key of the class, a string or an integer."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return (self.text_column, self.label_column)


class PreferenceColumns(Settings):
    """Prompts, each with a better and a worse answer."""

    form: Literal["preferences"]
    """The form of the examples."""
    layout: Literal["answers", "conversations"] = "answers"
    """`answers`: a prompt and two answers, all strings; `conversations`: two lists of
    `{role, content}` that differ only in their last message."""
    prompt_column: str = "prompt"
    """The column of the user's turn, for `answers`."""
    chosen_column: str = "chosen"
    """The column of the better answer, or of the conversation that ends with it."""
    rejected_column: str = "rejected"
    """The column of the worse answer, or of the conversation that ends with it."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        answers = (self.chosen_column, self.rejected_column)
        return (self.prompt_column, *answers) if self.layout == "answers" else answers


ExampleColumns = Annotated[
    PairColumns | ConversationColumns | LabeledColumns | PreferenceColumns,
    Field(discriminator="form"),
]


# Names of tables and columns enter statements as they are, between backquotes (`bigquery`): nothing
# that these patterns allow ends such a name.
TABLE = r"^[A-Za-z0-9_-]+\.[A-Za-z0-9_]+\.[A-Za-z0-9_]+$"
COLUMN = r"^[A-Za-z_][A-Za-z0-9_]{0,299}$"
_COMMENTS = r"(?:\s|--.*\n|#.*\n|/\*(?:[^*]|\*(?!/))*\*/)*"
"""A comment between slashes ends where it first can: otherwise it could hide a statement."""
SELECT = re.compile(rf"{_COMMENTS}(select|with)\b", re.IGNORECASE)
"""The beginning of a query, after comments."""


def _check_name(name: str) -> str:
    if not name.strip() or has_control_characters(name):
        raise ValueError("must not be blank, and has no control character")
    return name


SourceName = Annotated[str, AfterValidator(_check_name)]


class PackageDocs(Settings):
    """The docstrings of Python packages installed in this environment, read without importing."""

    type: Literal["package_docs"]
    """The kind of source."""
    name: SourceName = "package_docs"
    """The source's name; every document carries it."""
    packages: list[str] = Field(min_length=1)
    """Top-level import names, such as `numpy`; each must be installed as Python source."""
    minimum_characters: int = Field(default=200, ge=1)
    """Minimum length of a docstring, in characters; most docstrings below 200 are one line long."""


class Facts(Settings):
    """A table of facts, for example from a database, told as text: each fact in several forms."""

    type: Literal["facts"]
    """The kind of source."""
    name: SourceName = "facts"
    """The source's name; every document carries it."""
    path: LocalPath
    """A local CSV file with the columns `subject`, `relation` and `value`; a subject has
    only one value per relation."""
    forms: LocalPath
    """A local YAML file that maps each relation to `told`, sentences with `{value}` and, usually,
    `{subject}`. For `exam`, a relation also has `asked`, beginnings of sentences with `{subject}`
    that the value completes."""
    facts_per_document: int = Field(default=4, ge=1)
    """Maximum number of facts that one document tells, all about the same subject."""


class Files(Settings):
    """Files in many formats, optionally compressed (`.gz`, `.zst`, `.bz2`, `.xz`)."""

    type: Literal["files"]
    """The kind of source."""
    name: SourceName = "files"
    """The source's name; every document carries it."""
    path: Place
    """A file, a folder (read with its subfolders) or a glob, local or `gs://`, optionally with
    braces: `name.{1..128}-of-128.jsonl.gz`."""
    text_column: str = "text"
    """The column or JSON key that holds the text; `page.text` is the key `text` within `page`. Only
    `json`, `csv` and `parquet` files have columns."""
    text_template: str | tuple[str, ...] | None = None
    """How the text is composed of several columns or JSON keys, instead of `text_column`, such as
    `"Question: {question}\\nAnswer: {answer}"`. A line of the template whose columns are all empty
    is left out. If there are several templates, a row uses the first one for which it has all
    columns, otherwise the first one for which it has any."""
    examples: ExampleColumns | None = None
    """The columns of examples to learn a task from, instead of a text column. A file in a format
    other than `json`, `csv` and `parquet` then counts as unreadable (`on_bad_file`); leave such
    formats out of `formats` if the folder holds other files as well."""
    strip_html: bool = False
    """Whether to read only the text of columns with HTML in them, without the tags; indentation is
    kept in `<pre>` alone. A text without a closing tag or `<br>` loses only entities (`&amp;`)."""
    id_column: str | None = None
    """The column or JSON key that holds the document's id. If unset, and in formats without
    columns, ids are made from the file's path and the document's place in the file. A row that
    takes the place of another is no edit of it, so an edit is known by its text alone."""
    maximum_faulty_share: float = Field(default=0.01, ge=0, le=1)
    """Maximum share of unusable documents, which are set aside and counted; above it, the run
    fails. Empty documents do not count toward it."""
    formats: tuple[FormatName, ...] = tuple(name for name in FORMATS if name != "code")
    """Which formats to read: `text` (also Markdown, reStructuredText, logs, README and LICENSE),
    `html`, `pdf`, `docx`, `notebook`, `mail` (`.eml`, `.mbox`), `subtitles`, `xml`, `rtf`, `odt`,
    `pptx`, `xlsx`, `epub`, `json` (one object per line, or a list of objects), `csv` (also `.tsv`),
    `parquet`, `archive` (zip and tar) and, if named here, `code`. Files in any other format are
    counted, and the first ones named. Text that is not UTF-8 is decoded if its encoding can be
    determined, and counted."""
    encoding: str | None = None
    """The encoding of text that is not UTF-8, for example `gb18030`, `shift_jis` or `cp1250`. If
    unset, UTF-16 and Windows-1252 are recognized, and text in any other encoding counts as
    unusable. Files that name their encoding, such as most web pages, do not need it."""
    on_bad_file: Literal["stop", "quarantine"] = "stop"
    """What happens if an entire file cannot be read, for example because it is damaged or
    encrypted, because it lacks the text column (of several rows, none has it) or because permission
    is denied: the run fails (`stop`), or the file is left out and counted (`quarantine`). With
    `quarantine`, `maximum_faulty_share` does not apply: the run goes on as long as some text
    remains."""
    hidden: bool = False
    """Whether to read files and folders whose names begin with a dot."""
    follow_links: bool = False
    """Whether to follow links to files outside the folder; links to folders are never followed."""
    maximum_document_megabytes: float = Field(default=64, gt=0, le=1024)
    """Maximum size of a document, in megabytes of text; larger ones are set aside and counted. A
    larger field in a `csv` file makes the whole file unreadable."""
    maximum_expansion: float = Field(default=200, gt=1)
    """Maximum ratio of a file's unpacked size to its stored size. A file that exceeds it and is
    larger than 64 MiB when unpacked counts as unreadable, since it may be a compression bomb."""

    @field_validator("encoding")
    @classmethod
    def _extends_ascii(cls, encoding: str | None) -> str | None:
        try:
            # UTF-16 is recognized without, and a file is cut into lines before it is decoded.
            is_usable = encoding is None or "{\n".encode(encoding) == b"{\n"
        except LookupError:
            is_usable = False
        if not is_usable:
            raise ValueError(
                f"{encoding!r} is not the name of a text encoding that extends ASCII, such as "
                "gb18030, shift_jis or cp1250"
            )
        return encoding

    @field_validator("text_template")
    @classmethod
    def _names_columns(cls, template: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        templates = (template,) if isinstance(template, str) else template
        if templates is not None and (not templates or not all(map(template_columns, templates))):
            raise ValueError("a template must name its columns in braces, such as {question}")
        return template

    @model_validator(mode="after")
    def _can_be_read(self) -> Self:
        if self.examples and self.text_template:
            raise ValueError(f"{self.name} has `examples` and `text_template`; give only one")
        if self.path.endswith((".pkl", ".pickle")):
            raise ValueError(
                f"{self.path} is a pickle, which can run code and is never read. If you trust it "
                "and it holds a data frame, convert it and set `path` to the result: python -c "
                "\"import pandas; pandas.read_pickle('data.pkl').to_json('data.jsonl', "
                "orient='records', lines=True)\""
            )
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that are read; every row must have them, or those of a template."""
        return _columns(self)

    @property
    def templates(self) -> tuple[str, ...]:
        """Those of the text; none where one column is the text."""
        given = self.text_template or ()
        return (given,) if isinstance(given, str) else given


class HuggingFaceDataset(Settings):
    """A Hugging Face dataset."""

    type: Literal["hugging_face"]
    """The kind of source."""
    name: SourceName = "hugging_face"
    """The source's name; every document carries it."""
    dataset: Place
    """The dataset's name on the Hub, or a folder, local or in a bucket, with its data files or as
    `save_to_disk` writes it. If `HF_HUB_OFFLINE` is set, a dataset of the Hub is read from the
    local Hub cache."""
    subset: str | None = None
    """The dataset's subset (its configuration name), if it has several."""
    split: str = "train"
    """Which split to read. A folder in which `save_to_disk` wrote a single split is read whole."""
    revision: str | None = None
    """Branch, tag or commit of the dataset on the Hub; by default, `main`."""
    text_column: str = "text"
    """The column that holds the text."""
    examples: ExampleColumns | None = None
    """The columns of examples to learn a task from, instead of a text column."""
    id_column: str | None = None
    """The column that holds the document's id; if unset, the id is the source's name and the row
    number, and an edit of a row is known by its text alone."""
    maximum_faulty_share: float = Field(default=0.01, ge=0, le=1)
    """Maximum share of unusable documents, which are set aside and counted; above it, the run
    fails. Empty documents do not count toward it."""

    templates: ClassVar[tuple[str, ...]] = ()
    """Its text is that of one column."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns that every row must have."""
        return _columns(self)


class BigQuery(Settings):
    """A BigQuery table or query, whose rows are exported to Parquet files in Cloud Storage."""

    type: Literal["bigquery"]
    """The kind of source."""
    name: str = Field(default="bigquery", pattern=r"^[a-z][a-z0-9_]*$")
    """The source's name: lowercase letters, digits and underscores; every document carries it."""
    table: str | None = Field(default=None, pattern=TABLE)
    """`project.dataset.table`; give either this or `query`."""
    query: str | None = None
    """One SELECT statement that returns the id and text columns, and `watermark_column` if that is
    set."""
    id_column: str = Field(default="id", pattern=COLUMN)
    """The column that identifies a document."""
    text_column: str = Field(default="text", pattern=COLUMN)
    """The column that holds the text."""
    maximum_faulty_share: float = Field(default=0.01, ge=0, le=1)
    """Maximum share of unusable documents, which are set aside and counted; above it, the run
    fails. Empty documents do not count toward it."""
    watermark_column: str | None = Field(default=None, pattern=COLUMN)
    """A column whose value grows when rows are added or changed, such as `ingested_at`. Together
    with the number of rows and the columns' types, it shows whether the text has changed; without
    it, the modification times of the tables do. A view as `table` needs it, and so do an external
    table and a query of tables that BigQuery does not list, as behind `EXTERNAL_QUERY`."""
    export: str = Field(pattern=r"^gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[\w.=@+/-]*)?$")
    """Folder for the exported Parquet files, as `gs://bucket/folder`; its path may contain letters,
    digits and `/._=@+-`."""
    project: str
    """The project that runs and pays for the BigQuery jobs."""
    location: str = "US"
    """The location of the dataset."""
    maximum_gigabytes_billed: float = Field(default=100.0, gt=0)
    """A job that would be billed for more GiB than this fails before it costs anything."""

    @field_validator("query")
    @classmethod
    def _is_one_select(cls, query: str | None) -> str | None:
        if query is None:
            return None
        stripped = query.strip().rstrip(";")
        # A second statement would follow a semicolon; one within a text is refused, too.
        if not SELECT.match(stripped) or ";" in stripped:
            raise ValueError("only one SELECT statement (or WITH ... SELECT) is allowed")
        return stripped

    @model_validator(mode="after")
    def _has_one_origin(self) -> "BigQuery":
        if (self.table is None) == (self.query is None):
            raise ValueError("give either `table` or `query`, and not both")
        return self

    @property
    def origin(self) -> str:
        """The table or the query as a FROM clause takes it."""
        # A comment may end the query, and would take the parenthesis with it.
        return f"`{self.table}`" if self.table else f"({self.query}\n)"


def template_columns(template: str) -> tuple[str, ...]:
    """The columns that a template names, each once; raises ValueError where it is none."""
    parts = [part for line in template.splitlines() for part in Formatter().parse(line)]
    if any(column == "" or form or conversion for _, column, form, conversion in parts):
        raise ValueError("braces must hold a column's name and nothing else, such as {question}")
    return tuple(dict.fromkeys(column for _, column, *_ in parts if column))


def _columns(source: Files | HuggingFaceDataset) -> tuple[str, ...]:
    if source.examples:
        named = source.examples.columns
    else:
        of_templates = (
            column for template in source.templates for column in template_columns(template)
        )
        named = tuple(dict.fromkeys(of_templates)) or (source.text_column,)
    return (*named, source.id_column) if source.id_column else named


Source = Annotated[
    PackageDocs | Facts | Files | HuggingFaceDataset | BigQuery, Field(discriminator="type")
]

PLACES = {"path", "forms", "dataset", "export", "project", "location", "maximum_gigabytes_billed"}
"""Settings of sources that say where text is read or at what price, not what is read."""


class RawCorpusSettings(Settings):
    """The sources of text, which are read into a pinned snapshot."""

    sources: list[Source] = Field(min_length=1)
    """One or more sources, each with its own name, read in the order given."""

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
        examples = {source.name: getattr(source, "examples", None) for source in self.sources}
        return {
            name: columns.form if columns else "pretraining" for name, columns in examples.items()
        }

    @property
    def numbered_sources(self) -> list[str]:
        """Those whose rows are named by their numbers, for want of an `id_column`."""
        return [
            source.name
            for source in self.sources
            if isinstance(source, Files | HuggingFaceDataset) and source.id_column is None
        ]

    def content(self) -> dict[str, Any]:
        """What decides the snapshot besides the sources' fingerprints: paths are left out."""
        return {"sources": list(map(content_of, self.sources))}


def content_of(source: Source) -> dict[str, Any]:
    """The settings of a source that decide what is read of it."""
    content = source.model_dump(mode="json", exclude=PLACES)
    if content.get("text_template") is None:
        # What was made before there were templates, without one, is what it was.
        content.pop("text_template", None)
    return content
