"""What of a raw corpus tasks are to copy, and what this process copies before."""

from collections.abc import Mapping
from pathlib import Path

from spark_jobs.read.job import ReadSpec, SourceToCopy
from spark_jobs.read.opened import OpenedSource
from spark_jobs.read.settings import RawCorpusSettings
from spark_jobs.read.snapshot import copy_source
from spark_jobs.runtime.scratch import scratch_folder


def bytes_in_buckets(opened: Mapping[str, OpenedSource]) -> int:
    """Of the files that tasks can copy, as they are stored."""
    chunks = [chunk for one in opened.values() for chunk in one.chunks.files or []]
    return sum(file.bytes for chunk in chunks for file in chunk)


def plan_tasks(
    settings: RawCorpusSettings,
    opened: Mapping[str, OpenedSource],
    folder: Path,
    output: str,
    cache: str,
) -> ReadSpec:
    """Leave the files of buckets to tasks; read here what only this machine may reach.

    Args:
        folder: of this machine, beside which files pass through.
        output: where tasks write the raw corpus.
        cache: folder that tasks reach.

    Raises:
        UserError, SourceChanged: as `snapshot.write_snapshot`.
    """
    sources: list[SourceToCopy] = []
    with scratch_folder(str(folder.with_name(f"{folder.name}.scratch"))) as scratch:
        for source in settings.sources:
            chunks, unread = opened[source.name].chunks, opened[source.name].unread
            to_copy = SourceToCopy(source=source, chunks=chunks.files or [], unread=unread)
            if chunks.files is None:
                to_copy.records = copy_source(chunks, source, Path(scratch), cache)
            sources.append(to_copy)
    return ReadSpec(sources=sources, output=output, cache=cache)
