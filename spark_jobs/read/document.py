"""One document of the raw corpus, and how it lies in Parquet."""

from dataclasses import dataclass

import pyarrow as pa

from artifacts.examples import plain_text, read_example


@dataclass(slots=True)
class Document:
    """A document as its source gives it."""

    id: str
    text: str
    source: str
    package: str | None = None
    version: str | None = None
    license: str | None = None
    path: str | None = None
    """Of the file it comes from, relative to the source's folder."""
    language: str | None = None
    """The programming language of code."""
    example: str | None = None
    """Of a task's example, `artifacts.examples.write_example`; `text` is then its plain text."""


SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        ("package", pa.string()),
        ("version", pa.string()),
        ("license", pa.string()),
        ("path", pa.string()),
        ("language", pa.string()),
        ("example", pa.string()),
    ]
)


def of_example(identifier: str, example: str, source: str, path: str | None = None) -> Document:
    """The document of an example."""
    text = plain_text(read_example(example))
    return Document(identifier, text, source, path=path, example=example)


def to_table(documents: list[Document]) -> pa.Table:
    """Documents as rows of `SCHEMA`."""
    return pa.table(
        {name: [getattr(document, name) for document in documents] for name in SCHEMA.names},
        schema=SCHEMA,
    )
