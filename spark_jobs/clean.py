"""Raw text to clean text: normalised, bounded in length, without copies and near-copies.

Run as a program: `python -m spark_jobs.clean --spec spec.json`.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from spark_jobs import entry
from spark_jobs.decisions import write_decisions, write_part
from spark_jobs.evaluation_texts import keep_evaluation_runs
from spark_jobs.judge import DUPLICATES_NAME, Judgement, judge
from spark_jobs.kept import list_kept, remove_others
from spark_jobs.parquet import find_parts, find_pinned, read_table, write_table
from spark_jobs.prepare import RAW_COLUMNS, name_prepared, prepare_part
from spark_jobs.settings import CleanCorpusSettings
from spark_jobs.similarity import name_similarities
from spark_jobs.tasks import map_tasks

CODE_VERSION = "6"

EXAMPLE_CHARACTERS = 160

_DECISIONS_NAME = "decisions.arrow"


class CleanSpec(BaseModel):
    """One run of this job."""

    model_config = ConfigDict(extra="forbid")

    raw_corpus: str
    """Folder of the raw corpus."""
    output: str
    """Folder that the clean corpus is written into."""
    settings: CleanCorpusSettings
    pinned_held_out: str | None = None
    """Folder of earlier shards whose held-out documents stay exactly those."""
    evaluation_texts: list[str] = []
    """Text files (`.txt`: one document; `.jsonl`: one a line, under `text`) of evaluation sets."""
    cache: str | None = None
    """Folder that keeps prepared parts for the next run; it decides speed, never the result."""


def run(
    spark: SparkSession, spec: CleanSpec, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Write the clean corpus, `part-NNNNN.parquet` of `CLEAN_SCHEMA`; return the stats.

    Beside the parts, `duplicates.parquet` lists every copy that was dropped and why
    (`spark_jobs.judge.DUPLICATE_SCHEMA`).

    Returns:
        `documents`, `bytes`, `documents_read`, `bytes_read`, `dropped` (reason to documents),
        `dropped_bytes`, `dropped_examples` (reason to a few `id` and `text` beginnings),
        `repaired` (documents whose encoding was), `clusters` (kept), `cluster_sizes` (documents in
        a cluster to clusters), `pinned` (documents that the pin holds out), `sources` (name to
        documents kept), `length_histogram` (a power of two to the documents of so many characters
        or up to twice that), `candidate_pairs`, `verified_pairs`, `parts`, `parts_prepared` (the
        others were kept from an earlier run).

    Raises:
        UserError: there is no raw corpus, an id comes twice, or no document is left.
    """
    settings = spec.settings
    parts = find_parts(spec.raw_corpus, RAW_COLUMNS, "raw_corpus")
    pinned = find_pinned(spec.pinned_held_out)
    scratch = spec.cache or f"{spec.output}.scratch"
    runs = keep_evaluation_runs(spec.evaluation_texts, scratch, settings.decontamination)
    urls = [name_prepared(scratch, part, settings, runs) for part in parts + pinned]
    there = list_kept(scratch)
    missing = {
        url: part
        for part, url in zip(parts + pinned, urls, strict=True)
        if url.rpartition("/")[2] not in there
    }
    map_tasks(
        spark,
        "normalising and signing",
        [(part, url) for url, part in missing.items()],
        partial(prepare_part, settings=settings, runs=runs),
        report,
    )
    similarities = name_similarities(scratch, settings)
    judgement = judge(urls, settings, report, len(pinned), similarities)
    stats = _stats(judgement, settings)
    decisions = f"{spec.output}.{_DECISIONS_NAME}"
    write_decisions(decisions, judgement.documents, judgement.part_offsets)
    written = map_tasks(
        spark,
        "writing clean text",
        list(enumerate(urls)),
        partial(write_part, decisions=decisions, output=spec.output, cache=spec.cache),
        report,
    )
    write_table(f"{spec.output}/{DUPLICATES_NAME}", judgement.duplicates)
    stats["dropped_examples"] = _examples(judgement, urls, settings.examples_per_reason)
    kept = [similarities, *urls, *(record["kept"] for record in written)]
    _tidy(decisions, scratch, list(filter(None, kept)) if spec.cache else [])
    report(
        f"{stats['documents']:,} of {stats['documents_read']:,} documents kept, "
        f"{stats['bytes'] / 1e6:,.1f} MB"
    )
    return stats | {
        "pinned": int(np.sum(judgement.documents["pinned"].to_numpy())),
        "parts": len(parts),
        "parts_prepared": len(missing),
    }


def _stats(judgement: Judgement, settings: CleanCorpusSettings) -> dict[str, Any]:
    rows = (
        judgement.documents.group_by(["reason", "source"])
        .aggregate([("bytes", "sum"), ("bytes", "count")])
        .to_pylist()
    )
    reasons = sorted({row["reason"] for row in rows if row["reason"]})

    def total(field: str, reason: str | None) -> int:
        return sum(row[f"bytes_{field}"] for row in rows if row["reason"] == reason)

    documents = total("count", None)
    dropped = {reason: total("count", reason) for reason in reasons}
    if not documents:
        raise UserError(_nothing_left(dropped, settings))
    sizes, counts = np.unique(judgement.cluster_sizes, return_counts=True)
    return {
        "documents": documents,
        "bytes": total("sum", None),
        "documents_read": judgement.documents.num_rows,
        "bytes_read": sum(row["bytes_sum"] for row in rows),
        "dropped": dropped,
        "dropped_bytes": {reason: total("sum", reason) for reason in reasons},
        "clusters": documents,
        "repaired": int(np.sum(judgement.documents["repaired"].to_numpy())),
        "cluster_sizes": {str(s): int(c) for s, c in zip(sizes, counts, strict=True)},
        "sources": {
            row["source"]: row["bytes_count"]
            for row in sorted(rows, key=lambda row: str(row["source"]))
            if row["reason"] is None
        },
        "length_histogram": _length_histogram(judgement),
        "candidate_pairs": judgement.candidate_pairs,
        "verified_pairs": judgement.verified_pairs,
    }


def _length_histogram(judgement: Judgement) -> dict[str, int]:
    """Kept documents by length: the largest power of two not above it, to documents."""
    characters = judgement.documents["characters"].to_numpy()[judgement.kept]
    bounds, counts = np.unique(np.frexp(characters)[1] - 1, return_counts=True)
    return {str(2 ** int(b)): int(c) for b, c in zip(bounds, counts, strict=True)}


def _nothing_left(dropped: dict[str, int], settings: CleanCorpusSettings) -> str:
    counts = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.items())
    return (
        "No document is left after cleaning"
        + (f" ({counts})" if counts else ", since the raw corpus is empty")
        + f". Give `raw_corpus` more text, or lower `clean_corpus.minimum_characters` (now "
        f"{settings.minimum_characters})."
    )


def _examples(judgement: Judgement, urls: list[str], count: int) -> dict[str, list[dict[str, str]]]:
    """The first `count` dropped documents of each reason, by id, with the beginning of each."""
    documents = judgement.documents
    examples: dict[str, list[dict[str, str]]] = {}
    for reason in sorted(filter(None, pc.unique(documents["reason"]).to_pylist())):
        numbers = np.flatnonzero(np.asarray(pc.equal(documents["reason"], reason).fill_null(False)))
        ids = documents["id"].take(pa.array(numbers)).combine_chunks()
        chosen = numbers[np.asarray(pc.sort_indices(ids))[:count]]
        examples[reason] = [_excerpt(int(number), judgement, urls) for number in chosen]
    return examples


def _excerpt(number: int, judgement: Judgement, urls: list[str]) -> dict[str, str]:
    part = int(np.searchsorted(judgement.part_offsets, number, side="right")) - 1
    texts = read_table(urls[part], ["text"])["text"]
    text = texts[number - int(judgement.part_offsets[part])].as_py()
    return {"id": judgement.documents["id"][number].as_py(), "text": text[:EXAMPLE_CHARACTERS]}


def _tidy(decisions: str, scratch: str, wanted: list[str]) -> None:
    """Remove what the next run has no use for."""
    filesystem, path = fsspec.core.url_to_fs(decisions)
    filesystem.rm(path)
    if wanted:
        remove_others(scratch, wanted)
    else:
        filesystem.rm(fsspec.core.url_to_fs(scratch)[1], recursive=True)


if __name__ == "__main__":
    sys.exit(entry.main(CleanSpec, run))
