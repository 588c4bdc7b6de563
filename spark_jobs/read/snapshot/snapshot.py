"""The pinned snapshot of source text: Parquet files of `(id, text, source, …)`."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from artifacts.cache import cache_key
from artifacts.storage.files import link
from spark_jobs.read.bigquery import open_bigquery, read_exported
from spark_jobs.read.chunks import Batch, Chunks, listed_key, single_chunk
from spark_jobs.read.docstrings import open_packages
from spark_jobs.read.files.digests import Digests
from spark_jobs.read.files.reading import open_files, read_listed
from spark_jobs.read.hugging_face import open_dataset
from spark_jobs.read.opened import OpenedSource
from spark_jobs.read.settings import (
    BigQuery,
    Files,
    HuggingFaceDataset,
    PackageDocs,
    RawCorpusSettings,
    Source,
    content_of,
)
from spark_jobs.read.snapshot.chunk_files import ChunkRecord, write_chunks
from spark_jobs.read.snapshot.identifiers import number_repeated_ids, set_bad_ids_aside
from spark_jobs.read.snapshot.statistics import Records, file_names, judge_source, snapshot_stats
from spark_jobs.runtime.pinned.file import ListedFile, PinnedFile
from spark_jobs.runtime.raw_parts import PINNED_NAME
from spark_jobs.runtime.scratch import scratch_folder

CODE_VERSION = "7"
LIBRARIES = ["datasets", "pyarrow", "pypdf", "python-docx", "trafilatura"]
"""Packages that decide what is read."""


def open_sources(
    settings: RawCorpusSettings,
    report: Callable[[str], None] = lambda line: None,
    apart: str | None = None,
    digests: Digests | None = None,
) -> dict[str, OpenedSource]:
    """Every source by name, as it is now.

    Args:
        report: told how far hashing, and later reading, are.
        apart: a folder that is no source text wherever it lies: the store.
        digests: what is known of files from a look before.

    Raises:
        UserError: a package, path, table or dataset is not there or cannot be read.
    """
    opened = {}
    for source in settings.sources:
        if isinstance(source, PackageDocs):
            opened[source.name] = open_packages(source, report)
        elif isinstance(source, BigQuery):
            opened[source.name] = open_bigquery(source, report)
        elif isinstance(source, HuggingFaceDataset):
            opened[source.name] = open_dataset(source, report)
        else:
            opened[source.name] = open_files(source, report, apart, digests)
    return opened


def fingerprints_of(opened: Mapping[str, OpenedSource]) -> dict[str, str]:
    """Source (for packages: `source/package`) to a hash of its content."""
    return {name: one for source in opened.values() for name, one in source.fingerprints.items()}


def source_fingerprints(settings: RawCorpusSettings, apart: str | None = None) -> dict[str, str]:
    """The fingerprints of the sources as they are now; raises UserError as `open_sources`."""
    return fingerprints_of(open_sources(settings, apart=apart))


def write_snapshot(
    settings: RawCorpusSettings,
    folder: Path,
    report: Callable[[str], None] = print,
    cache: str | None = None,
    opened: Mapping[str, OpenedSource] | None = None,
) -> dict[str, Any]:
    """Read every source and write `part-NNNNN.parquet` files; the same input gives the same bytes.

    Files that are pinned are listed in place of that (`spark_jobs.runtime.raw_parts`).

    Args:
        cache: folder of what earlier runs have read (`artifacts.cache`); it decides speed, never
            the result.
        opened: the sources, if they were opened before; what is read is what was opened.

    Returns:
        The manifest's stats: `documents`, `bytes` (UTF-8), `dropped` (reason to count), `sources`
        (name to documents and bytes), `licenses` (name to documents), `faults` (the first ones of
        each source and reason, named), `unread` (kind of file to count), `unread_examples` (kind to
        the first names), `repeated_ids` (ids that were given a number), `pinned_files`. Of pinned
        text, `documents` are its rows, and `bytes` what its files' footers say, of JSON lines those
        of the lines.

    Raises:
        UserError: a source cannot be read, or all of them together hold no document.
        SourceChanged: a source changed while it was read.
    """
    opened = opened or open_sources(settings, report)
    records: Records = {}
    pinned: list[PinnedFile] = []
    with scratch_folder(str(folder.with_name(f"{folder.name}.scratch"))) as scratch:
        for source in settings.sources:
            of_source = opened[source.name]
            if of_source.pin:
                found, text_bytes = of_source.pin()
                pinned += found
                records[source.name] = [pinned_record(found, text_bytes)]
            else:
                records[source.name] = copy_source(of_source.chunks, source, Path(scratch), cache)
                judge_source(source, records[source.name])
        files = _lay_out([Path(scratch) / name for name in file_names(records)], folder)
    list_pinned(pinned, folder)
    stats = snapshot_stats(records, [one.unread for one in opened.values()])
    return stats | {"repeated_ids": number_repeated_ids(files), "pinned_files": len(pinned)}


def listed_chunk(source: Source, listed: list[ListedFile]) -> Chunks:
    """A chunk of files that lie in a bucket (`Chunks.files`), in whichever process reads it."""

    def read() -> Iterator[Batch]:
        for one in listed:
            if isinstance(source, BigQuery):
                yield from read_exported(source, one)
            else:
                assert isinstance(source, Files)
                yield from read_listed(source, one)

    return single_chunk(listed_key(listed), read)


def copy_source(
    chunks: Chunks, source: Source, folder: Path, cache: str | None
) -> list[ChunkRecord]:
    """Write the Parquet files of chunks of a source into a folder, and cache them.

    Returns:
        The records of all chunks, in order.
    """
    # Under keys of the cache: the chunks' content is not all that decides what is read.
    settings = content_of(source)
    keys = [
        cache_key(write_snapshot.__module__, LIBRARIES, settings=settings, content=key)
        for key in chunks.keys
    ]
    return write_chunks(replace(set_bad_ids_aside(chunks), keys=keys), folder, cache)


def pinned_record(found: list[PinnedFile], text_bytes: int) -> ChunkRecord:
    """What is in files that are pinned."""
    return ChunkRecord(documents=sum(file.rows for file in found), bytes=text_bytes)


def list_pinned(pinned: list[PinnedFile], folder: Path) -> None:
    """Write the list of pinned files, where there are any, into the snapshot's folder."""
    if pinned:
        lines = "".join(f"{file.model_dump_json()}\n" for file in pinned)
        (folder / PINNED_NAME).write_text(lines)


def _lay_out(kept: list[Path], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"part-{number:05d}.parquet" for number in range(len(kept))]
    # Equal chunks, of one source named twice or of two, are one file.
    for file, target in zip(kept, files, strict=True):
        if not link(file, target):
            shutil.copyfile(file, target)
    return files
