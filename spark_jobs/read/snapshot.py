"""The pinned snapshot of source text: Parquet files of `(id, text, source, …)`."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from artifacts.cache import cache_key
from artifacts.errors import UserError
from artifacts.storage.files import link, scratch_folder
from artifacts.store.identity import hash_json
from artifacts.store.layout import SCRATCH_SUFFIX
from spark_jobs.read.bigquery import open_bigquery, read_exported
from spark_jobs.read.docstrings import open_packages
from spark_jobs.read.document import EXAMPLES, MOST_EXAMPLES, judge_faults
from spark_jobs.read.facts import open_facts
from spark_jobs.read.files.reading import EXTRACTORS, Digests, open_files, read_stored
from spark_jobs.read.hugging_face import open_dataset
from spark_jobs.read.opened import (
    ChunkRecord,
    Chunks,
    OpenedSource,
    SkippedFiles,
    file_chunks,
    number_repeated_ids,
    write_chunks,
)
from spark_jobs.read.settings import (
    BigQuery,
    Facts,
    Files,
    HuggingFaceDataset,
    PackageDocs,
    RawCorpusSettings,
    Source,
    content_of,
)
from spark_jobs.read.source_file import RemoteFile
from spark_jobs.runtime.parquet import find_rows

Records = dict[str, list[ChunkRecord]]
"""What was read of each source, by the source's name."""


def judge_source(source: Source, records: list[ChunkRecord]) -> None:
    """Raise UserError where more of a source's documents cannot be used than it allows."""
    documents = sum(record.documents for record in records)
    judge_faults(source, documents, _sum("faults", records), _examples(records))


def file_names(records: Records) -> list[str]:
    """The Parquet files of all chunks, in order."""
    return [name for of_source in records.values() for record in of_source for name in record.files]


def snapshot_stats(records: Records, unread: Iterable[SkippedFiles]) -> dict[str, Any]:
    """The stats of `write_snapshot` but for `repeated_ids`; raises UserError without a document.

    Args:
        unread: of each source what lies beside its text.
    """
    of_all = [record for of_source in records.values() for record in of_source]
    skipped = _merged([*unread, *(record.unread for record in of_all)])
    decoded = _merged(record.decoded for record in of_all)
    stats: dict[str, Any] = {
        "documents": sum(record.documents for record in of_all),
        "bytes": sum(record.bytes for record in of_all),
        "sources": {
            name: {
                "documents": sum(record.documents for record in of_source),
                "bytes": sum(record.bytes for record in of_source),
            }
            for name, of_source in records.items()
            if any(record.documents for record in of_source)
        },
        "licenses": dict(sorted(_sum("licenses", of_all).items())),
        "dropped": dict(_sum("faults", of_all)),
        "faults": [example for of_source in records.values() for example in _examples(of_source)],
        "unread": dict(skipped.counts.most_common()),
        "unread_examples": skipped.examples,
        "decoded": dict(decoded.counts.most_common()),
        "decoded_examples": decoded.examples,
    }
    if not stats["documents"]:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in stats["dropped"].items())
        raise UserError(
            "The raw corpus is empty: the sources hold no document with text."
            + (f" Set aside: {counts}. The first:" if counts else "")
            + "".join(f"\n  {fault}" for fault in stats["faults"][:EXAMPLES])
            + (f"\nNot read: {skipped}." if skipped.counts else "")
            + "\nMend what is named, or check `raw_corpus.sources`."
        )
    return stats


def _merged(counted: Iterable[SkippedFiles]) -> SkippedFiles:
    """All of them as one, with the first names of each kind."""
    merged = SkippedFiles()
    for one in counted:
        merged.merge(one)
    merged.examples = {kind: names[:EXAMPLES] for kind, names in merged.examples.items()}
    return merged


def _sum(field: str, records: list[ChunkRecord]) -> Counter[str]:
    return sum((getattr(record, field) for record in records), Counter[str]())


def _examples(records: list[ChunkRecord]) -> list[str]:
    return [example for record in records for example in record.examples][:MOST_EXAMPLES]


CODE_VERSION = "22"
LIBRARIES = frozenset({"datasets", "pyarrow"}) | EXTRACTORS
"""All libraries that may decide what is read."""


def open_sources(
    settings: RawCorpusSettings,
    report: Callable[[str], None] = lambda line: None,
    apart: str | None = None,
    digests: Digests | None = None,
) -> dict[str, OpenedSource]:
    """Every source by name, as it is now.

    Args:
        report: told how far hashing, and later reading, are.
        apart: a folder that is never source text, wherever it is: the store.
        digests: what an earlier look found out about files.

    Raises:
        UserError: a package, path, table or dataset is not there or cannot be read.
    """
    opened = {}
    folders = [source for source in settings.sources if isinstance(source, Files)]
    for source in settings.sources:
        if isinstance(source, PackageDocs):
            opened[source.name] = open_packages(source, report)
        elif isinstance(source, Facts):
            opened[source.name] = open_facts(source)
        elif isinstance(source, BigQuery):
            opened[source.name] = open_bigquery(source, report)
        elif isinstance(source, HuggingFaceDataset):
            opened[source.name] = open_dataset(source, report)
        else:
            opened[source.name] = open_files(source, report, apart, digests, folders)
    return opened


def fingerprints_of(opened: Mapping[str, OpenedSource]) -> dict[str, str]:
    """Hashes of the sources' contents, by source (for packages: `source/package`)."""
    return {
        name: fingerprint
        for source in opened.values()
        for name, fingerprint in source.fingerprints.items()
    }


def write_snapshot(
    settings: RawCorpusSettings,
    folder: Path,
    report: Callable[[str], None] = print,
    cache: str | None = None,
    opened: Mapping[str, OpenedSource] | None = None,
) -> dict[str, Any]:
    """Read every source and write `part-NNNNN.parquet` files; the same input gives the same bytes.

    Args:
        cache: folder of what earlier runs have read (`artifacts.cache`); it decides speed, never
            the result.
        opened: the sources, if they were opened before; what is read is what was opened.

    Returns:
        The manifest's stats: `documents`, `bytes` (UTF-8), `dropped` (reason to count), `sources`
        (name to documents and bytes), `licenses` (name to documents), `faults` (the first ones of
        each source and reason, named), `unread` (kind of file to count), `unread_examples` (kind to
        the first names), `repeated_ids` (ids that were given a number).

    Raises:
        UserError: a source cannot be read, or all of them together hold no document.
        SourceChanged: a source changed while it was read.
    """
    opened = opened or open_sources(settings, report)
    records: Records = {}
    # Beside the output, so that the files are linked and not copied.
    with scratch_folder(str(folder.with_name(f"{folder.name}{SCRATCH_SUFFIX}"))) as scratch:
        for source in settings.sources:
            chunks = opened[source.name].chunks
            # Source by source: too many faults in one end the run before the next is read.
            records[source.name] = copy_source(chunks, source, Path(scratch), cache)
            judge_source(source, records[source.name])
        folder.mkdir(parents=True, exist_ok=True)
        files = []
        for number, name in enumerate(file_names(records)):
            files.append(folder / f"part-{number:05d}.parquet")
            # Equal chunks, of one source named twice or of two, are one file.
            if not link(Path(scratch) / name, files[-1]):
                shutil.copyfile(Path(scratch) / name, files[-1])
    stats = snapshot_stats(records, [source.unread for source in opened.values()])
    return stats | {"repeated_ids": number_repeated_ids(files)}


def listed_chunk(source: Source, listed: list[RemoteFile]) -> Chunks:
    """A chunk of files that lie in a bucket (`Chunks.files`), in whichever process reads it."""
    if isinstance(source, BigQuery):
        return file_chunks([listed], partial(read_exported, source))
    assert isinstance(source, Files)
    return file_chunks([listed], partial(read_stored, source=source))


def copy_source(
    chunks: Chunks, source: Source, folder: Path, cache: str | None
) -> list[ChunkRecord]:
    """Write the Parquet files of a source's chunks, as `write_chunks` does."""
    # The cache's keys cover settings and libraries besides the chunks' content. The versions of
    # the libraries are looked up once, and not for each chunk: 6 ms each time.
    settings = content_of(source)
    key = cache_key("chunk", write_snapshot.__module__, [*LIBRARIES], settings=settings)
    keys = [hash_json({"of": key, "content": content}) for content in chunks.keys]
    return write_chunks(replace(chunks, keys=keys), folder, cache)


def libraries_of(opened: Mapping[str, OpenedSource]) -> set[str]:
    """The libraries that decide the snapshot: they read its sources, or write Parquet."""
    return {"pyarrow"}.union(*(source.libraries for source in opened.values()))


def compare_texts(
    opened: Mapping[str, OpenedSource], raw_corpus: str, libraries: set[str]
) -> Iterator[tuple[str, object, object]]:
    """Compare a few documents of each source: id, text in the snapshot, and text as read now.

    Args:
        raw_corpus: folder of the snapshot that was made of these very sources.
        libraries: those that have changed; documents that they read are preferred.
    """
    for name, source in opened.items():
        texts = source.sample(libraries)
        rows = (pc.field("source") == name) & pc.field("id").isin(list(texts))
        for row in find_rows(raw_corpus, "raw_corpus", rows, ["id", "text"], len(texts)):
            yield row["id"], row["text"], texts[row["id"]]
