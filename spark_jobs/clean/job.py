"""Raw text to clean text: normalized, filtered, without copies and near-copies.

Each document by itself is normalized, filtered and signed (`prepare`). Then the driver decides over
all of them, from their small columns: exact copies are grouped (`deduplicate.group_exact`),
near-copies found among the rest (`near_duplicates`: candidates by shared bands, `verify`: true
similarities, connected components), and one survivor and its split chosen for each cluster
(`deduplicate.decide_survivors`). Last, tasks write the documents that stay (`write`).

Run as a program: `python -m spark_jobs.clean.job --spec spec.json`.
"""

import sys
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.program.entry import run_program
from artifacts.progress import Report
from spark_jobs.clean.deduplicate import (
    Decisions,
    PastTexts,
    decide_survivors,
    find_near,
    group_exact,
)
from spark_jobs.clean.duplicates import DUPLICATES_NAME
from spark_jobs.clean.history import PAST_FOLDER, History, read_history, write_past
from spark_jobs.clean.prepare import RAW_COLUMNS, prepare_parts
from spark_jobs.clean.prepared import Prepared
from spark_jobs.clean.statistics import corpus_stats, dropped_examples
from spark_jobs.clean.verify import fetch_shingles
from spark_jobs.clean.write import write_decisions, write_part
from spark_jobs.decontaminate.evaluation_texts import save_evaluation_ngrams
from spark_jobs.runtime.parquet import find_parts, write_table
from spark_jobs.runtime.scratch import scratch_folder
from spark_jobs.runtime.session import session
from spark_jobs.runtime.tasks import map_tasks
from spark_jobs.settings import CleanCorpusSettings

CODE_VERSION = "9"


class Forgotten(BaseModel):
    """Documents that are left out as if the sources did not hold them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ids: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    """By their `text_hash`, whatever id they come back under."""


class CleanSpec(BaseModel):
    """One run of this job."""

    model_config = ConfigDict(extra="forbid")

    raw_corpus: str
    """Folder of the raw corpus."""
    output: str
    """Folder that the clean corpus is written into."""
    settings: CleanCorpusSettings
    earlier: str | None = None
    """Folder of the clean corpus that the lineage was last trained on, whose splits hold on."""
    forgotten: Forgotten = Forgotten()
    """What is to be in no corpus any more."""
    evaluation_texts: list[str] = []
    """Text files (`.txt`: one document; `.jsonl`: one a line, under `text`) of evaluation sets."""
    cache: str | None = None
    """Folder of what earlier runs made (`artifacts.cache`); it decides speed, never results."""


def run(spark: SparkSession, spec: CleanSpec, report: Report = print) -> dict[str, Any]:
    """Write the clean corpus, `part-NNNNN.parquet` of `CLEAN_SCHEMA`; return the stats.

    Beside the parts, `duplicates.parquet` lists every copy that was dropped and why
    (`spark_jobs.clean.duplicates.DUPLICATE_SCHEMA`).

    Returns:
        `documents`, `bytes`, `documents_read`, `bytes_read`, `dropped` (reason to documents),
        `dropped_bytes`, `dropped_examples` (reason to a few `id` and `text` beginnings),
        `repaired` (documents whose encoding was), `clusters` (kept), `cluster_sizes` (documents in
        a cluster to clusters), `splits` (name to documents), `slice` (number of this corpus in its
        lineage), `slices` (that to split to documents), `past` (texts of earlier corpora that are
        none of its documents), `sources` (name to documents kept), `length_histogram` (a power of
        two to the documents of so many characters or up to twice that), `candidate_pairs`,
        `verified_pairs`, `parts`, `parts_prepared` (the others were cached).

    Raises:
        UserError: there is no raw corpus, an id comes twice, or no document is left.
    """
    with scratch_folder(f"{spec.output}.scratch") as scratch:
        return _run(spark, spec, scratch, report)


def _run(spark: SparkSession, spec: CleanSpec, scratch: str, report: Report) -> dict[str, Any]:
    settings = spec.settings
    raw = find_parts(spec.raw_corpus, RAW_COLUMNS, "raw_corpus")
    history = read_history(spec.earlier)
    forgotten = pa.array(spec.forgotten.texts, pa.string())
    ngrams = save_evaluation_ngrams(spec.evaluation_texts, scratch, settings.decontamination)
    prepare = partial(
        prepare_parts, spark, settings=settings, ngrams=ngrams, cache=spec.cache, report=report
    )
    parts = prepare(raw, f"{scratch}/prepared")
    corpus = Prepared(parts, [], spec.forgotten.ids, spec.forgotten.texts)
    corpus.refuse_repeated_ids()
    _refuse_unknown_sources(corpus, settings)
    past, past_parts = PastTexts(), []
    if history:
        known = pa.chunked_array([*_sound_hashes(corpus).chunks, forgotten])
        past = PastTexts(history, history.missing(known))
        texts_left = write_past(spark, history, past.places, f"{scratch}/past", report)
        past_parts = prepare(texts_left, f"{scratch}/prepared_past")
    prepared = corpus
    if past_parts:
        prepared = Prepared(parts, past_parts, spec.forgotten.ids, spec.forgotten.texts)

    texts = group_exact(prepared.documents, settings.split)
    words = settings.near_duplicates.shingle_words
    shingles = partial(fetch_shingles, spark, prepared, words=words, scratch=scratch, report=report)
    near = find_near(prepared, texts, settings, shingles)
    report(
        f"{len(texts.members) - len(texts.representatives):,} exact copies; {near.candidates:,} "
        f"candidate pairs, {near.verified:,} of them compared, {len(near.edges.left):,} near-copies"
    )
    decisions = decide_survivors(prepared.documents, texts, near, past, settings.split)
    stats = corpus_stats(decisions, near, settings)

    _write(spark, prepared, decisions, spec.output, scratch, report)
    left = _left_out(history, decisions, forgotten)
    if history:
        write_past(spark, history, left, f"{spec.output}/{PAST_FOLDER}", report)
    report(
        f"{stats['documents']:,} of {stats['documents_read']:,} documents kept, "
        f"{stats['bytes'] / 1e6:,.1f} MB"
    )
    return stats | {
        "dropped_examples": dropped_examples(decisions, prepared, settings.examples_per_reason),
        "slice": history.slice if history else 1,
        "past": len(left),
        "parts": len(parts),
        "parts_prepared": sum(part.is_new for part in parts),
    }


def _write(
    spark: SparkSession,
    prepared: Prepared,
    decisions: Decisions,
    output: str,
    scratch: str,
    report: Report,
) -> None:
    """Write the documents that stay, and the list of the copies that do not."""
    url = f"{scratch}/decisions.arrow"
    write_decisions(url, decisions.documents, prepared.offsets)
    work = partial(write_part, decisions=url, output=output)
    map_tasks(spark, "writing clean text", list(enumerate(prepared.parts)), work, report)
    write_table(f"{output}/{DUPLICATES_NAME}", decisions.duplicates)


def _sound_hashes(prepared: Prepared) -> pa.ChunkedArray:
    documents = prepared.documents
    return documents["text_hash"].filter(pc.is_null(documents["fault"]))


def _left_out(history: History | None, decisions: Decisions, forgotten: pa.Array) -> np.ndarray:
    """The record's texts that are none of the documents that stay: their places in it."""
    if history is None:
        return np.empty(0, np.int64)
    hashes = decisions.documents["text_hash"]
    stay = hashes.filter(pa.array(decisions.stays)).combine_chunks()
    return history.missing(pa.chunked_array([stay, forgotten]))


def _refuse_unknown_sources(prepared: Prepared, settings: CleanCorpusSettings) -> None:
    sources = set(prepared.documents["source"].unique().to_pylist())
    for name in sorted(settings.split.sources.keys() - sources):
        raise UserError(
            f"`clean_corpus.split.sources` names the source {name!r}, of which the raw corpus has "
            f"no text; its sources are {', '.join(sorted(sources))}."
        )


if __name__ == "__main__":
    sys.exit(run_program(CleanSpec, lambda spec, report: run(session(), spec, report)))
