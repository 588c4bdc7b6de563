"""The pinned snapshot of source text: Parquet files of `(id, text, source, …)`."""

import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from artifacts.cache import cache_key
from artifacts.errors import UserError
from spark_jobs.read.bigquery import open_bigquery
from spark_jobs.read.chunks import Chunks
from spark_jobs.read.docstrings import open_packages
from spark_jobs.read.faults import EXAMPLES, UNREAD, judge_faults
from spark_jobs.read.files.digests import Digests
from spark_jobs.read.files.reading import open_files
from spark_jobs.read.hugging_face import open_dataset
from spark_jobs.read.opened import OpenedSource
from spark_jobs.read.settings import (
    BigQuery,
    HuggingFaceDataset,
    PackageDocs,
    RawCorpusSettings,
    Source,
    content_of,
)
from spark_jobs.read.snapshot.chunk_files import ChunkRecord, write_chunks
from spark_jobs.read.snapshot.identifiers import number_repeated_ids, set_bad_ids_aside
from spark_jobs.runtime.pinned.file import PinnedFile
from spark_jobs.runtime.raw_parts import PINNED_NAME
from spark_jobs.runtime.scratch import scratch_folder

CODE_VERSION = "7"
LIBRARIES = ["google-cloud-bigquery", "pyarrow"]
"""Packages that sources are read with."""
MOST_EXAMPLES = 50
"""Faults of a source that are kept with their messages."""


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
    records: dict[str, list[ChunkRecord]] = {}
    pinned: list[PinnedFile] = []
    with scratch_folder(str(folder.with_name(f"{folder.name}.scratch"))) as scratch:
        for source in settings.sources:
            if pin := opened[source.name].pin:
                found, text_bytes = pin()
                pinned += found
                documents = sum(file.rows for file in found)
                records[source.name] = [ChunkRecord(documents=documents, bytes=text_bytes)]
                continue
            chunks = _keyed(set_bad_ids_aside(opened[source.name].chunks), source)
            records[source.name] = write_chunks(chunks, Path(scratch), cache)
            _judge_faults(source, records[source.name])
        of_all = [record for found in records.values() for record in found]
        files = _lay_out([Path(scratch) / name for one in of_all for name in one.files], folder)
    _list_pinned(pinned, folder)
    stats = _stats(records) | _unread(records, opened)
    _refuse_nothing(stats)
    return stats | {"repeated_ids": number_repeated_ids(files), "pinned_files": len(pinned)}


def _keyed(chunks: Chunks, source: Source) -> Chunks:
    """The chunks under keys of the cache: their content is not all that decides what is read."""
    settings = content_of(source)
    keys = [
        cache_key(write_snapshot.__module__, LIBRARIES, settings=settings, content=key)
        for key in chunks.keys
    ]
    return Chunks(keys, chunks.read)


def _judge_faults(source: Source, records: list[ChunkRecord]) -> None:
    share = getattr(source, "maximum_faulty_share", 0.0)
    sound = sum(record.documents + record.empty for record in records)
    judge_faults(source.name, share, sound, _sum("faults", records), _examples(records))


def _lay_out(kept: list[Path], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"part-{number:05d}.parquet" for number in range(len(kept))]
    # Equal chunks, of one source named twice or of two, are one file.
    for file, target in zip(kept, files, strict=True):
        shutil.copyfile(file, target)
    return files


def _list_pinned(pinned: list[PinnedFile], folder: Path) -> None:
    if pinned:
        lines = "".join(f"{file.model_dump_json()}\n" for file in pinned)
        (folder / PINNED_NAME).write_text(lines)


def _stats(records: dict[str, list[ChunkRecord]]) -> dict[str, Any]:
    of_all = [record for found in records.values() for record in found]
    faults = {k: n for k, n in _sum("faults", of_all).items() if not k.startswith(UNREAD)}
    dropped = Counter(empty=sum(record.empty for record in of_all)) + Counter(faults)
    return {
        "documents": sum(record.documents for record in of_all),
        "bytes": sum(record.bytes for record in of_all),
        "sources": {
            name: {
                "documents": sum(record.documents for record in found),
                "bytes": sum(record.bytes for record in found),
            }
            for name, found in records.items()
            if any(record.documents for record in found)
        },
        "licenses": dict(sorted(_sum("licenses", of_all).items())),
        "dropped": dict(dropped),
        "faults": [example for found in records.values() for example in _examples(found)],
    }


def _unread(
    records: dict[str, list[ChunkRecord]], opened: Mapping[str, OpenedSource]
) -> dict[str, Any]:
    """What was found and not read, beside the files and within archives."""
    found = [one.unread for one in opened.values()]
    counts = sum((Counter(one.counts) for one in found), Counter[str]())
    examples = {kind: list(names) for one in found for kind, names in one.examples.items()}
    for of_source in records.values():
        for reason, count in _sum("faults", of_source).items():
            if reason.startswith(UNREAD):
                named = [one for record in of_source for one in record.examples]
                beginning = f"{reason}: "
                names = [o.removeprefix(beginning) for o in named if o.startswith(beginning)]
                kind = reason.removeprefix(UNREAD)
                counts[kind] += count
                examples[kind] = (examples.get(kind, []) + names)[:EXAMPLES]
    return {"unread": dict(counts.most_common()), "unread_examples": examples}


def _sum(field: str, records: list[ChunkRecord]) -> Counter[str]:
    return sum((Counter(getattr(record, field)) for record in records), Counter[str]())


def _examples(records: list[ChunkRecord]) -> list[str]:
    examples = (example for record in records for example in record.examples)
    return [one for one in examples if not one.startswith(UNREAD)][:MOST_EXAMPLES]


def _refuse_nothing(stats: dict[str, Any]) -> None:
    if stats["documents"]:
        return
    empty = stats["dropped"].get("empty")
    raise UserError(
        "The raw corpus is empty: the sources hold no document with text"
        + (f" ({empty:,} were empty)." if empty else ".")
        + " Check `raw_corpus.sources`."
    )
