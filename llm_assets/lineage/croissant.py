"""A clean corpus as a Croissant dataset: https://docs.mlcommons.org/croissant, version 1.0."""

from collections.abc import Sequence
from typing import Any

from artifacts.errors import UserError
from artifacts.store.manifest import Manifest

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "includes": "cr:includes",
    "key": "cr:key",
    "md5": "cr:md5",
    "recordSet": "cr:recordSet",
    "sc": "https://schema.org/",
    "source": "cr:source",
}
PARQUET = "application/vnd.apache.parquet"
COLUMNS = {
    "id": ("sc:Text", "The document's id in its source."),
    "text": ("sc:Text", "The cleaned text."),
    "source": ("sc:Text", "The source that it comes from."),
    "split": ("sc:Text", "train, validation, held_out or replay."),
    "cluster": ("sc:Text", "The duplicate cluster that it stands for."),
}


def dataset(pipeline: str, licenses: Sequence[str], corpus: Manifest) -> dict[str, Any]:
    """The description as JSON-LD values; files are named relative to the corpus's folder.

    Args:
        licenses: of the documents.

    Raises:
        UserError: the manifest no longer lists its files, or without their SHA-256, which the
            format asks for.
    """
    parts = [entry for entry in corpus.files if entry.path.startswith("part-")]
    if not parts or not all(entry.sha256 for entry in parts):
        raise UserError(
            f"clean_corpus {corpus.fingerprint} has no files with SHA-256 on record, so it cannot "
            "be described as a Croissant dataset: it was removed, or lies in Cloud Storage."
        )
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": pipeline,
        "description": f"The clean corpus of the pipeline {pipeline}: normalized, filtered and "
        "deduplicated text, cut into splits.",
        "datePublished": f"{corpus.created_at:%Y-%m-%d}",
        "license": list(licenses) or ["unknown"],
        "version": "1.0.0",
        "identifier": corpus.fingerprint,
        "url": f"urn:llm-assets:clean_corpus:{corpus.fingerprint}",
        "distribution": [
            {
                "@type": "cr:FileObject",
                "@id": entry.path,
                "name": entry.path,
                "contentUrl": entry.path,
                "contentSize": f"{entry.bytes} B",
                "encodingFormat": PARQUET,
                "sha256": entry.sha256,
            }
            for entry in parts
        ],
        "recordSet": [_records(entry.path) for entry in parts],
    }


def _records(path: str) -> dict[str, Any]:
    name = path.removesuffix(".parquet")
    return {
        "@type": "cr:RecordSet",
        "@id": f"documents-{name}",
        "name": f"documents-{name}",
        "key": {"@id": f"documents-{name}/id"},
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"documents-{name}/{column}",
                "name": f"documents-{name}/{column}",
                "description": description,
                "dataType": kind,
                "source": {"fileObject": {"@id": path}, "extract": {"column": column}},
            }
            for column, (kind, description) in COLUMNS.items()
        ],
    }
