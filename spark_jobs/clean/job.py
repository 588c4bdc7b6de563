"""Raw text to clean text: normalized, filtered, without copies and near-copies.

Each document by itself is normalized, filtered and signed (`prepare`). Then it is decided over all
of them, from their small columns (`decide`): exact copies are grouped, near-copies found among the
rest (candidates by shared bands, verified by true similarity, connected components), and one
survivor and its split chosen for each cluster. Where the settings ask for it, spans that stand in
several of them are taken out (`repeated`). Last, tasks write the documents that stay (`write`).

Run as a program: `python -m spark_jobs.clean.job --spec spec.json`.
"""

import sys
from collections import Counter
from functools import partial
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.program.entry import run_program
from artifacts.progress import Report
from spark_jobs.clean.classify import check_models
from spark_jobs.clean.decide.choice import choose_decider
from spark_jobs.clean.decide.decider import DECIDED_SCHEMA, Outcome, Run
from spark_jobs.clean.decide.documents import DocumentPart, Forgotten
from spark_jobs.clean.decide.duplicates import write_duplicates
from spark_jobs.clean.history import PAST_FOLDER, read_history, write_past
from spark_jobs.clean.prepare import prepare_parts, prepared_schema
from spark_jobs.clean.repeated.stage import trim_repeats
from spark_jobs.clean.statistics import corpus_stats, dropped_examples
from spark_jobs.clean.write import CLEAN_SCHEMA, write_part, writing_key
from spark_jobs.decontaminate.evaluation_texts import save_evaluation_ngrams
from spark_jobs.runtime.part_rows import PartRows
from spark_jobs.runtime.raw_parts import find_raw_parts
from spark_jobs.runtime.scratch import scratch_folder
from spark_jobs.runtime.session import session
from spark_jobs.runtime.tasks import map_tasks
from spark_jobs.runtime.usage import measured
from spark_jobs.settings import DOCUMENTS_IN_MEMORY, CleanCorpusSettings

CODE_VERSION = "11"


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
    documents_in_memory: int = DOCUMENTS_IN_MEMORY
    """Most documents that are decided over in the driver's memory (`decide.choice`); both ways give
    the same."""


def run(spark: SparkSession, spec: CleanSpec, report: Report = print) -> dict[str, Any]:
    """Write the clean corpus, `part-NNNNN.parquet` of `CLEAN_SCHEMA`; return the stats.

    Beside the parts, `duplicates-NNNNN.parquet` list every copy that was dropped and why
    (`spark_jobs.clean.decide.duplicates.DUPLICATE_SCHEMA`), and under `repeated_spans/` every span
    that stands in an earlier document (`spark_jobs.clean.repeated.trim.SPAN_SCHEMA`).

    Returns:
        `documents`, `bytes`, `documents_read`, `bytes_read`, `dropped` (reason to documents),
        `dropped_bytes`, `dropped_examples` (reason to a few `id` and `text` beginnings), `repaired`
        (documents whose encoding was), `cluster_sizes` (documents in a cluster to the clusters that
        were found, whichever of them stay), `splits` (name to documents), `slice` (number of this
        corpus in its lineage), `slices` (that to split to documents), `past` (texts of earlier
        corpora that are none of its documents), `sources` (name to documents kept),
        `length_histogram` (a power of two to the documents of so many characters or up to twice
        that), `candidate_pairs`, `verified_pairs`, `parts`, `parts_prepared` (the others were
        cached); with classifiers, `labels` (of each, label to documents kept); where they are
        looked for, `repeated_spans` (`documents` with any, `spans`, their `words` and `bytes`).

    Raises:
        UserError: there is no raw corpus, an id comes twice, or no document is left.
    """
    with scratch_folder(f"{spec.output}.scratch") as scratch:
        return _run(spark, spec, scratch, report)


def _run(spark: SparkSession, spec: CleanSpec, scratch: str, report: Report) -> dict[str, Any]:
    settings = spec.settings
    raw = find_raw_parts(spec.raw_corpus)
    history = read_history(spec.earlier)
    ngrams = save_evaluation_ngrams(spec.evaluation_texts, scratch, settings.decontamination)
    prepare = partial(
        prepare_parts,
        spark,
        settings=settings,
        ngrams=ngrams,
        models=check_models(settings.classifiers, _columns(settings)),
        cache=spec.cache,
        report=report,
    )
    prepared = prepare(raw, f"{scratch}/prepared")
    parts = list(map(DocumentPart, prepared))
    run = Run(spark, settings, history, spec.forgotten, scratch, report, spec.cache)
    decider = choose_decider(run, parts, raw, spec.documents_in_memory)
    _refuse_repeated_ids(decider.repeated_ids())
    _refuse_unknown_sources(decider.sources(), settings)
    past: list[DocumentPart] = []
    if history:
        texts = write_past(spark, history, decider.texts_left(), f"{scratch}/past", report)
        past = list(map(DocumentPart, prepare(texts, f"{scratch}/prepared_past"), texts))

    outcome = decider.decide(past)
    report(
        f"{outcome.exact_copies:,} exact copies; {outcome.candidates:,} candidate pairs, "
        f"{outcome.verified:,} of them compared, {outcome.near_copies:,} near-copies"
    )
    stats = corpus_stats(outcome, settings) | {"past": outcome.left.count}
    outcome, changed, stats = _trim(run, outcome, stats, parts, spec.output)
    labels = _write(run, outcome, changed, parts, spec.output)
    if history:
        write_past(spark, history, outcome.left, f"{spec.output}/{PAST_FOLDER}", report)
    report(
        f"{stats['documents']:,} of {stats['documents_read']:,} documents kept, "
        f"{stats['bytes'] / 1e6:,.1f} MB"
    )
    return stats | {
        "dropped_examples": dropped_examples(outcome, parts),
        "slice": outcome.slice,
        **({"labels": labels} if labels else {}),
        "parts": len(parts),
        "parts_prepared": sum(part.is_new for part in prepared),
    }


def _columns(settings: CleanCorpusSettings) -> pa.Schema:
    """All columns of the text, prepared and clean."""
    decided = [field for field in CLEAN_SCHEMA if field.name in DECIDED_SCHEMA.names]
    return pa.schema([*prepared_schema(settings), *decided])


def _trim(
    run: Run, outcome: Outcome, stats: dict[str, Any], parts: list[DocumentPart], output: str
) -> tuple[Outcome, PartRows, dict[str, Any]]:
    """What stays, the texts that change, and the stats, once repeated spans are dealt with."""
    if run.settings.repeated_spans.action == "ignore":
        return outcome, PartRows({}), stats
    trimmed = trim_repeats(run, outcome, parts, output)
    return trimmed.outcome, trimmed.texts, trimmed.stats(stats)


def _write(
    run: Run, outcome: Outcome, changed: PartRows, parts: list[DocumentPart], output: str
) -> dict[str, dict[str, int]]:
    """Write the documents that stay, some with other texts, and the list of the dropped copies.

    Returns:
        Each classifier's name to its labels to documents.
    """
    places = sorted(outcome.stay.places.items())
    items = [(n, parts[n].prepared, place, changed.places.get(n)) for n, place in places]
    classifiers = run.settings.classifiers
    work = partial(
        write_part,
        classifiers=classifiers,
        output=output,
        key=writing_key(classifiers),
        cache=run.cache,
    )
    records = map_tasks(run.spark, "writing clean text", items, work, run.report)
    write_duplicates(run.spark, outcome.duplicates, output, run.report)
    labels = {one.name: Counter[str]() for one in classifiers}
    for record in records:
        for name, found in record["labels"].items():
            labels[name].update(found)
    return {name: dict(sorted(found.items())) for name, found in labels.items()}


def _refuse_repeated_ids(repeated: list[tuple[str, int]]) -> None:
    if repeated:
        named = ", ".join(f"{identifier!r} ({count} times)" for identifier, count in repeated)
        raise UserError(
            f"The raw corpus holds the same id more than once: {named}. Every document needs an id "
            "of its own: choose another `id_column`, or leave it out."
        )


def _refuse_unknown_sources(sources: set[str], settings: CleanCorpusSettings) -> None:
    for name in sorted(settings.split.sources.keys() - sources):
        raise UserError(
            f"`clean_corpus.split.sources` names the source {name!r}, of which the raw corpus has "
            f"no text; its sources are {', '.join(sorted(sources))}."
        )


if __name__ == "__main__":
    sys.exit(run_program(CleanSpec, lambda spec, report: measured(run, session(), spec, report)))
