"""Copies text from buckets into a raw corpus by tasks, each a chunk at a time.

Chunks, not tasks, decide where rows are cut, and a chunk's files are named by what decides them: so
the corpus has the bytes that one process writes (`spark_jobs.read.snapshot`), and a task
that is run twice writes the same files. Text goes from the bucket into the cache, and from there
into the corpus; the driver holds a small record of each chunk.

Run as a program: `python -m spark_jobs.read.job --spec spec.json`.
"""

import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from artifacts.cache import read_cached
from artifacts.errors import UserError, make_command
from artifacts.numbers import run_starts
from artifacts.program.entry import run_program
from artifacts.progress import Report
from artifacts.storage import files
from artifacts.storage.files import scratch_folder
from artifacts.store.layout import SCRATCH_SUFFIX
from spark_jobs.read import snapshot
from spark_jobs.read.files.streams import SourceChanged
from spark_jobs.read.opened import (
    ChunkRecord,
    OpenedSource,
    SkippedFiles,
    UniqueIds,
    change_ids,
)
from spark_jobs.read.settings import RawCorpusSettings, Source
from spark_jobs.read.source_file import RemoteFile
from spark_jobs.runtime.parquet import RowLocation
from spark_jobs.runtime.session import measured, session
from spark_jobs.runtime.tasks import Work, map_tasks

CHANGED = "changed"
"""Key of the only entry of a result, if a file changed since it was listed."""


class SourceToCopy(BaseModel):
    """A source: its chunks that tasks are to copy, or the records of chunks that were read."""

    model_config = ConfigDict(extra="forbid")

    source: Source
    chunks: list[list[RemoteFile]] = []
    """The files of each chunk."""
    records: list[ChunkRecord] = []
    """Of chunks whose files are in the cache."""
    unread: SkippedFiles = SkippedFiles()


class ReadSpec(BaseModel):
    """One run of this job."""

    model_config = ConfigDict(extra="forbid")

    sources: list[SourceToCopy]
    """In the order of the settings."""
    output: str
    """Folder that the raw corpus is written into."""
    cache: str
    """Folder through which the chunks' files go (`artifacts.cache`)."""
    libraries: dict[str, str] = {}
    """Versions of the libraries that decide the result; with others the program does not run."""


def bytes_in_buckets(opened: Mapping[str, OpenedSource]) -> int:
    """Stored bytes of the files that tasks can copy."""
    chunks = [chunk for source in opened.values() for chunk in source.chunks.files or []]
    return sum(file.size for chunk in chunks for file in chunk)


def plan_tasks(
    settings: RawCorpusSettings,
    opened: Mapping[str, OpenedSource],
    folder: Path,
    output: str,
    cache: str,
) -> ReadSpec:
    """Leave the files of buckets to tasks; read here what only this machine may reach, and raise
    what `snapshot.write_snapshot` raises.

    Args:
        folder: of this machine, beside which files pass through.
        output: where tasks write the raw corpus.
        cache: folder that tasks reach.
    """
    sources: list[SourceToCopy] = []
    with scratch_folder(str(folder.with_name(f"{folder.name}{SCRATCH_SUFFIX}"))) as scratch:
        for source in settings.sources:
            chunks, unread = opened[source.name].chunks, opened[source.name].unread
            to_copy = SourceToCopy(source=source, chunks=chunks.files or [], unread=unread)
            if chunks.files is None:
                to_copy.records = snapshot.copy_source(chunks, source, Path(scratch), cache)
            sources.append(to_copy)
    return ReadSpec(sources=sources, output=output, cache=cache)


def run(spark: SparkSession, spec: ReadSpec, report: Report = print) -> dict[str, Any]:
    """Write the raw corpus' `part-NNNNN.parquet`, and return the stats.

    Returns:
        As `snapshot.write_snapshot`; or, where a file changed since it was listed, under `CHANGED`
        which, and nothing was written. Whoever listed the sources lists them again then.

    Raises:
        UserError: a file cannot be read, or all of them together hold no document.
    """
    chunks = [(source.source, chunk) for source in spec.sources for chunk in source.chunks]
    copy = partial(_copy_chunk, cache=spec.cache)
    copied = map_tasks(spark, "copying text", chunks, copy, report)
    if changed := next((record for record in copied if CHANGED in record), None):
        return changed
    # In the order of `chunks`, which is that of the sources and of the chunks of each.
    copies = iter(copied)
    records: snapshot.Records = {}
    for source in spec.sources:
        # Those of chunks that were read before, or those that tasks have copied.
        of_tasks = [ChunkRecord.model_validate(next(copies)) for _ in source.chunks]
        records[source.source.name] = source.records + of_tasks
        # Before anything is written: too many faults end the job here.
        snapshot.judge_source(source.source, records[source.source.name])
    stats = snapshot.snapshot_stats(records, [source.unread for source in spec.sources])
    names = snapshot.file_names(records)
    lay_out = partial(_lay_out, cache=spec.cache)
    parts = [f"{spec.output}/part-{number:05d}.parquet" for number in range(len(names))]
    places = list(zip(names, parts, strict=True))
    map_tasks(spark, "writing the raw corpus", places, lay_out, report)
    with scratch_folder(f"{spec.output}{SCRATCH_SUFFIX}") as scratch:
        work = Work(spark, stats["documents"], scratch, report)
        repeated = number_repeated_ids(work, parts, report)
    return stats | {"repeated_ids": repeated}


def _copy_chunk(item: tuple[Source, list[RemoteFile]], cache: str) -> dict[str, Any]:
    """Bring a chunk's files into the cache, unless they are there."""
    source, listed = item
    try:
        with tempfile.TemporaryDirectory() as folder:
            (record,) = snapshot.copy_source(
                snapshot.listed_chunk(source, listed), source, Path(folder), cache
            )
    except SourceChanged as error:
        # Doing the task again would not help.
        return {CHANGED: str(error)}
    except UserError as error:
        # The driver recognizes it by this class (`spark_jobs.runtime.tasks.user_errors`).
        raise UserError(str(error)) from None
    return record.model_dump()


def _lay_out(item: tuple[str, str], cache: str) -> dict[str, Any]:
    """Write a file of the cache as a part of the corpus."""
    name, part = item
    content = read_cached(cache, name)
    if content is None:
        raise UserError(
            f"{cache}/{name} was removed or changed while the raw corpus was written. Nothing is "
            f"lost: {make_command('raw_corpus')}"
        )
    files.write(part, bytes(content), sync=False)
    return {}


_ID_SCHEMA = pa.schema([("part", pa.int64()), ("row", pa.int64()), ("id", pa.string())])
_CHANGED_SCHEMA = pa.schema([("row", pa.int64()), ("id", pa.string())])
_ENDINGS = "(#[0-9]+)+$"


def number_repeated_ids(work: Work, parts: list[str], report: Report) -> int:
    """Number ids that repeat, over any number of documents; return how many were numbered.

    The result is that of `opened.number_repeated_ids`, which works in the memory of one process. A
    repeated id becomes `a#2`, or `a#2#2` if that is taken, so only ids that are equal without such
    endings affect each other. They form a family, which one task goes through in the snapshot's
    order.
    """
    ids = work.over_parts(parts, _read_ids, _ID_SCHEMA)
    # Two families of one hash do no harm: `UniqueIds` goes by whole ids.
    families = ids.withColumn("family", F.xxhash64(F.regexp_replace("id", _ENDINGS, "")))
    # A family lies in one partition, in the snapshot's order, whichever parts its ids are from.
    ordered = families.repartition("family").sortWithinPartitions("family", "part", "row")
    changes = ordered.mapInArrow(_changes, from_arrow_schema(_ID_SCHEMA))
    changed = work.by_part(changes, _CHANGED_SCHEMA, "numbering ids that come again")
    items = [(parts[number], place) for number, place in changed.places.items()]
    map_tasks(work.spark, "writing numbered ids", items, _write_numbered, report)
    return changed.count


def _read_ids(number: int, part: str) -> pa.Table:
    with files.open_file(part) as file:
        ids = pq.ParquetFile(file, page_checksum_verification=True).read(["id"])["id"]
    places = [np.full(len(ids), number), np.arange(len(ids))]
    return pa.Table.from_arrays([*map(pa.array, places), ids], schema=_ID_SCHEMA)


def _changes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Find the repeated ids, in the order of families and places, with their numbers."""
    family, unique = None, UniqueIds()
    for batch in batches:
        families = batch["family"].to_numpy()
        changed: list[dict[str, Any]] = []
        # Only a family of several ids can have a repeated one.
        starts = run_starts(families)
        alone = starts & np.append(starts[1:], False)
        # The batch before may have ended with the first one's family.
        alone[:1] = False
        for place in np.flatnonzero(~alone).tolist():
            if families[place] != family:
                family, unique = families[place], UniqueIds()
            for _, numbered in unique.changes([batch["id"][place].as_py()]):
                row = {name: batch[name][place].as_py() for name in ("part", "row")}
                changed.append(row | {"id": numbered})
        yield pa.RecordBatch.from_pylist(changed, _ID_SCHEMA)


def _write_numbered(item: tuple[str, RowLocation]) -> dict[str, Any]:
    part, place = item
    rows = place.read()
    change_ids(part, dict(zip(rows["row"].to_pylist(), rows["id"].to_pylist(), strict=True)))
    return {}


if __name__ == "__main__":
    sys.exit(run_program(ReadSpec, lambda spec, report: measured(run, session(), spec, report)))
