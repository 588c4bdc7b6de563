"""Raw text to clean text: normalized, filtered, without copies and near-copies.

First, each document is normalized, filtered and signed by itself (`prepare`). Then small columns of
all of them are decided over (`decide`): exact copies are grouped, near-copies found among the rest
(candidates share bands, are verified by their true similarity and form connected components), and a
survivor and a split are chosen for each cluster. Finally, tasks write what stays (`write`).

Run as a program: `python -m spark_jobs.clean.job --spec spec.json`. After an upgrade of a library
that decides how documents are cleaned, `compare_documents` says whether they are cleaned as before.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.program.entry import run_program
from artifacts.progress import Report
from artifacts.shards.format import SPLITS
from artifacts.storage.files import scratch_folder
from artifacts.store.layout import SCRATCH_SUFFIX
from spark_jobs.clean.classify import check_models, label_fields
from spark_jobs.clean.decide.by_spark import SparkDecider
from spark_jobs.clean.decide.decider import (
    CONTRADICTING,
    DECIDED_SCHEMA,
    DROPPED_SCHEMA,
    TEMPLATE,
    DecidedDocuments,
    Decider,
    DecisionRun,
    read_dropped,
    write_list,
)
from spark_jobs.clean.decide.in_memory import InMemoryDecider
from spark_jobs.clean.forgotten import (
    MOST_SIMILAR,
    SIMILAR_NAME,
    ForgottenTexts,
    find_similar,
    read_signatures,
    read_similar,
    refuse_widespread,
    tell_similar,
)
from spark_jobs.clean.history import GUARDED, PAST_FOLDER, SPOILT, read_history, write_past
from spark_jobs.clean.prepare import (
    EXAMPLE_COLUMN,
    PreparedPart,
    prepare_parts,
    prepare_rows,
    prepared_schema,
)
from spark_jobs.clean.write import CLEAN_SCHEMA, write_part, writing_key
from spark_jobs.decontaminate.ngrams import save_evaluation_ngrams
from spark_jobs.runtime import parquet
from spark_jobs.runtime.session import measured, session
from spark_jobs.runtime.tasks import JobRun, map_tasks
from spark_jobs.settings import DOCUMENTS_IN_MEMORY, CleanCorpusSettings
from spark_jobs.text import text_hash

CODE_VERSION = "24"


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
    numbered_sources: tuple[str, ...] = ()
    """Sources whose rows are named by their numbers (`RawCorpusSettings.numbered_sources`)."""
    forgotten: ForgottenTexts = ForgottenTexts()
    """What no corpus may contain again."""
    libraries: dict[str, str] = {}
    """Versions of the libraries that decide the result; with others the program does not run."""
    evaluation_texts: list[str] = []
    """Text files (`.txt`: one document; `.jsonl`: one a line, under `text`) of evaluation sets."""
    cache: str | None = None
    """Folder of what earlier runs made (`artifacts.cache`); it decides speed, never results."""
    documents_in_memory: int = DOCUMENTS_IN_MEMORY
    """Maximum number of documents decided in the driver's memory; the result is the same."""


def run(spark: SparkSession, spec: CleanSpec, report: Report = print) -> dict[str, Any]:
    """Write the clean corpus, `part-NNNNN.parquet` of `CLEAN_SCHEMA`; return the stats.

    Beside the parts, `duplicates-NNNNN.parquet` list every copy that was dropped and why
    (`spark_jobs.clean.decide.decider.DUPLICATE_SCHEMA`), `similar_to_forgotten.parquet` what was
    left out since it holds forgotten text (`spark_jobs.clean.forgotten.SIMILAR_SCHEMA`), and
    `dropped-NNNNN.parquet` the other documents that were dropped (`decider.DROPPED_SCHEMA`).

    Returns:
        `documents`, `bytes`, `documents_read`, `bytes_read`, `dropped` (reason to documents),
        `dropped_bytes`, `repaired` (documents whose encoding was, or that lost characters, also
        before, where U+FFFD shows it), `cluster_sizes` (documents in a cluster to the clusters that
        were found, whichever of them stay), `splits` (name to documents), `slice` (number of this
        corpus in its lineage), `slices` (that to split to documents), `past` (texts of earlier
        corpora that are none of its documents), `sources` (name to documents kept),
        `length_histogram` (a power of two to the documents of so many characters or up to twice
        that), `candidate_pairs`, `verified_pairs`, `parts`, `parts_prepared` (the others were
        cached); with classifiers, `labels` (of each, label to documents kept); where there are
        such, `similar_to_forgotten` (the first documents that were left out since they hold
        forgotten text: `id`, `forgotten`, `similarity`) and `held_back` (`_find_held_back`).

    Raises:
        UserError: there is no raw corpus, an id comes twice, no document is left, or very many hold
            a forgotten text.
        DamagedArtifact: a file of signatures of forgotten texts is absent or was changed.
    """
    with scratch_folder(f"{spec.output}{SCRATCH_SUFFIX}") as scratch:
        return _run(JobRun(spark, report, scratch, spec.cache), spec)


def _run(job: JobRun, spec: CleanSpec) -> dict[str, Any]:
    settings = spec.settings
    # First, since nothing may be built while one of these files is damaged.
    signatures = read_signatures(spec.forgotten.signatures)
    raw = parquet.find_parts(spec.raw_corpus, parquet.RAW_COLUMNS, "raw_corpus")
    history = read_history(spec.earlier)
    recorded = history.parts if history else []
    ngrams = save_evaluation_ngrams(spec.evaluation_texts, job.scratch, settings.decontamination)
    # All columns that the clean text will have: classifiers may take the name of none.
    decided = [field for field in CLEAN_SCHEMA if field.name in DECIDED_SCHEMA.names]
    columns = pa.schema([*prepared_schema(settings), *decided])
    # Here, so that a model that is damaged or lacks a label ends the job before the long work.
    models = check_models(settings.classifiers, columns)
    folder = f"{job.scratch}/prepared"
    parts = prepare_parts(job, raw, folder, settings, ngrams, models)
    similar, forgotten = _leave_out_similar(
        spec.forgotten,
        find_similar(job, parts, spec.forgotten.searched, signatures),
        find_similar(job, recorded, spec.forgotten.searched, signatures),
    )
    run = DecisionRun(
        **vars(job),
        settings=settings,
        history=history,
        numbered_sources=spec.numbered_sources,
        forgotten=forgotten,
    )
    documents = sum(part.rows for part in [*raw, *recorded])
    # Both give the same corpus to the byte, so the bound is not part of its identity.
    decider = (
        InMemoryDecider(run, parts)
        if documents <= spec.documents_in_memory
        else SparkDecider(run, parts, documents)
    )
    _refuse_faults(decider, settings)
    outcome = decider.decide(_prepare_past(run, decider))
    job.report(
        f"{outcome.exact_copies:,} exact copies; {outcome.candidates:,} candidate pairs, "
        f"{outcome.verified:,} of them compared, {outcome.near_copies:,} near-copies"
    )
    # Before anything is written: it raises where no document is left.
    stats = corpus_stats(outcome, settings) | {"past": outcome.left.count}
    labels = _write(run, outcome, parts, spec.output)
    if similar.num_rows:
        parquet.write_table(f"{spec.output}/{SIMILAR_NAME}", similar)
        job.report(
            f"{similar.num_rows:,} documents are left out, since they hold text that was "
            f"forgotten: {tell_similar(similar)}"
        )
        shown = similar.select(["id", "forgotten", "similarity"]).slice(0, MOST_SIMILAR)
        stats["similar_to_forgotten"] = shown.to_pylist()
    job.report(
        f"{stats['documents']:,} of {stats['documents_read']:,} documents kept, "
        f"{stats['bytes'] / 1e6:,.1f} MB"
    )
    return stats | {
        "slice": outcome.slice,
        **_find_held_back(spec.output),
        **({"labels": labels} if labels else {}),
        "parts": len(parts),
        "parts_prepared": sum(part.is_new for part in parts),
    }


def _leave_out_similar(
    forgotten: ForgottenTexts, similar: pa.Table, past: pa.Table
) -> tuple[pa.Table, ForgottenTexts]:
    """The documents that are left out for their text alone, and all that is left out.

    Args:
        similar, past: rows of `forgotten.SIMILAR_SCHEMA`, of the corpus and of the record.
    """
    listed = pc.or_(
        pc.is_in(similar["id"], pa.array(forgotten.ids, pa.string())),
        pc.is_in(similar["text_hash"], pa.array(forgotten.texts, pa.string())),
    )
    similar = similar.filter(pc.invert(listed)).sort_by("id")
    # Documents that are dropped for a fault of their own have the hash of an empty text.
    is_dropped = pc.equal(similar["text_hash"], text_hash(""))
    # These would be dropped anyway, so that a person need not decide about them.
    refuse_widespread(similar.filter(pc.invert(is_dropped)), forgotten.searched)
    texts = {*similar["text_hash"].to_pylist(), *past["text_hash"].to_pylist()} - {text_hash("")}
    dropped = similar["id"].filter(is_dropped).to_pylist()
    similar_texts = {"similar": tuple(sorted(texts)), "similar_ids": tuple(dropped)}
    return similar, forgotten.model_copy(update=similar_texts)


def _refuse_faults(decider: Decider, settings: CleanCorpusSettings) -> None:
    """Raise UserError where an id comes twice, or the settings name a source without text."""
    if repeated := decider.repeated_ids():
        named = ", ".join(f"{identifier!r} ({count} times)" for identifier, count in repeated)
        raise UserError(
            f"The raw corpus holds the same id more than once: {named}. Every document needs an id "
            "of its own: choose another `id_column`, or leave it out."
        )
    sources = decider.sources()
    for name in sorted(settings.split.sources.keys() - sources):
        raise UserError(
            f"`clean_corpus.split.sources` names the source {name!r}, of which the raw corpus has "
            f"no text; its sources are {', '.join(sorted(sources))}."
        )


def _prepare_past(run: DecisionRun, decider: Decider) -> list[PreparedPart]:
    """Prepare the texts of the record that have left the sources."""
    if run.history is None:
        return []
    texts = write_past(run, run.history, decider.texts_left(), f"{run.scratch}/past")
    # They stay on record, whatever the settings now say about their length or quality, and keep
    # what is like them in their split.
    unlimited = run.settings.model_copy(
        update={
            "minimum_characters": 1,
            "maximum_characters": sys.maxsize,
            "quality_filters": [],
            "classifiers": [],
        }
    )
    folder = f"{run.scratch}/prepared_past"
    prepared = prepare_parts(run, texts, folder, unlimited, ngrams=None, models={})
    return [replace(part, record=text) for part, text in zip(prepared, texts, strict=True)]


def corpus_stats(outcome: DecidedDocuments, settings: CleanCorpusSettings) -> dict[str, Any]:
    """The stats of the manifest, as `run` describes them."""
    rows = outcome.fates
    reasons = sorted({row["reason"] for row in rows if row["reason"]})
    splits = dict.fromkeys(SPLITS, 0)
    slices: dict[str, dict[str, int]] = {}
    for counted in sorted(outcome.slices, key=lambda counted: (counted["slice"], counted["split"])):
        splits[counted["split"]] = splits.get(counted["split"], 0) + counted["documents"]
        slices.setdefault(str(counted["slice"]), {})[counted["split"]] = counted["documents"]

    def total(field: str, reason: str | None) -> int:
        return sum(row[field] for row in rows if row["reason"] == reason)

    kept = total("documents", None)
    dropped = {reason: total("documents", reason) for reason in reasons}
    if not kept:
        raise _nothing_left(dropped, settings)
    return {
        "documents": kept,
        "bytes": total("bytes", None),
        "documents_read": sum(row["documents"] for row in rows),
        "bytes_read": sum(row["bytes"] for row in rows),
        "dropped": dropped,
        "dropped_bytes": {reason: total("bytes", reason) for reason in reasons},
        "repaired": sum(row["repaired"] for row in rows),
        "cluster_sizes": {str(s): count for s, count in sorted(outcome.cluster_sizes.items())},
        "sources": {
            row["source"]: row["documents"]
            for row in sorted(rows, key=lambda row: str(row["source"]))
            if row["reason"] is None
        },
        "splits": splits,
        "slices": slices,
        "length_histogram": {str(2**e): count for e, count in sorted(outcome.lengths.items())},
        "candidate_pairs": outcome.candidates,
        "verified_pairs": outcome.verified,
    }


def _nothing_left(dropped: dict[str, int], settings: CleanCorpusSettings) -> UserError:
    counts = ", ".join(f"{reason}: {count:,}" for reason, count in dropped.items())
    # The reasons of filters and classifiers begin with their names.
    kinds = {reason.partition(":")[0] for reason in dropped}
    ways = ["Give `raw_corpus` more text"]
    if "too_short" in kinds:
        ways.append(f"lower `clean_corpus.minimum_characters` (now {settings.minimum_characters})")
    if "too_long" in kinds:
        ways.append(f"raise `clean_corpus.maximum_characters` (now {settings.maximum_characters})")
    if kinds & {*settings.quality_filters}:
        ways.append("take filters out of `clean_corpus.quality_filters`")
    if kinds & {classifier.name for classifier in settings.classifiers}:
        ways.append("let `clean_corpus.classifiers` keep more")
    return UserError(
        "No document is left after cleaning"
        + (f" ({counts})" if counts else ", since the raw corpus is empty")
        + f". {', or '.join(ways)}."
    )


def _write(
    run: DecisionRun, outcome: DecidedDocuments, parts: list[PreparedPart], output: str
) -> dict[str, dict[str, int]]:
    """Write the documents that stay, the lists of those that were dropped, and the record.

    Returns:
        Each classifier's name to its labels to documents.
    """
    # A part of which nothing stays gets no file.
    items = [(n, parts[n], place) for n, place in sorted(outcome.stay.places.items())]
    classifiers = run.settings.classifiers
    key = writing_key(classifiers)
    write = partial(write_part, classifiers=classifiers, output=output, key=key, cache=run.cache)
    records = map_tasks(run.spark, "writing clean text", items, write, run.report)
    write_list(run, outcome.duplicates, output, "duplicates")
    write_list(run, outcome.dropped, output, "dropped")
    if run.history:
        write_past(run, run.history, outcome.left, f"{output}/{PAST_FOLDER}")
    labels = {classifier.name: Counter[str]() for classifier in classifiers}
    for record in records:
        for name, counts in record["labels"].items():
            labels[name].update(counts)
    return {name: dict(sorted(counts.items())) for name, counts in labels.items()}


def _find_held_back(output: str) -> dict[str, Any]:
    """New versions of text that judges (`history.GUARDED`), where there are such, as `held_back`.

    It has how many `documents` they are and, of the cluster with most of them, the `versions`, the
    `first` one's id and the `original` that judges, which is None where that has left the sources.
    """
    held_back = read_dropped(output, DROPPED_SCHEMA, "reason", pa.array([GUARDED]))
    if not held_back.num_rows:
        return {}
    clusters = held_back.group_by("cluster").aggregate([("id", "count"), ("id", "min")])
    order = [("id_count", "descending"), ("cluster", "ascending")]
    (worst,) = clusters.sort_by(order).slice(0, 1).to_pylist()
    condition = pc.field("cluster") == worst["cluster"]
    judging = parquet.find_rows(output, "clean_corpus", condition, ["id"], 1)
    told = {"documents": held_back.num_rows, "versions": worst["id_count"]}
    original = judging[0]["id"] if judging else None
    return {"held_back": told | {"first": worst["id_min"], "original": original}}


def compare_documents(spec: CleanSpec, clean_corpus: str) -> Iterator[tuple[str, object, object]]:
    """Compare a few raw documents: id, fate in a clean corpus, and fate under the libraries now.

    Texts that are not ASCII come first, since repair and normalization change no others. For copies
    only whether they have a fault is compared. Documents whose fate depends on other text are
    skipped: what is forgotten, holds such text, is of a template, is of the text that judges, or
    has a label that others contradict.
    """
    settings = spec.settings
    raw = parquet.spread(
        parquet.find_parts(spec.raw_corpus, parquet.RAW_COLUMNS, "raw_corpus"),
        [*parquet.RAW_COLUMNS, EXAMPLE_COLUMN],
    )
    raw = raw.take(pc.sort_indices(pc.string_is_ascii(raw["text"]).cast("int8"))).slice(
        0, parquet.SAMPLED
    )
    with tempfile.TemporaryDirectory() as folder:
        ngrams = save_evaluation_ngrams(spec.evaluation_texts, folder, settings.decontamination)
        prepared = prepare_rows(raw, settings, ngrams)
    columns = ["text", *(name for name, _ in label_fields(settings.classifiers))]
    ids = raw["id"].combine_chunks()
    clean_rows = parquet.find_rows(
        clean_corpus, "clean_corpus", pc.field("id").isin(ids), ["id", *columns], parquet.SAMPLED
    )
    kept = {row["id"]: [row[name] for name in columns] for row in clean_rows}
    dropped = read_dropped(clean_corpus, DROPPED_SCHEMA, "id", ids)
    reasons = dict(zip(*dropped.select(["id", "reason"]).to_pydict().values(), strict=True))
    passed_over = {*spec.forgotten.ids, *read_similar(clean_corpus)["id"].to_pylist()}
    for row in prepared.to_pylist():
        values = [row[name] for name in columns]
        if row["id"] in passed_over or row["text_hash"] in spec.forgotten.texts:
            continue
        if row["id"] in kept:
            yield row["id"], kept[row["id"]], None if row["fault"] else values
            continue
        reason = reasons.get(row["id"])
        kind = (reason or "").partition(":")[0]
        if row["fault"] or kind not in (GUARDED, SPOILT, TEMPLATE, CONTRADICTING):
            yield row["id"], reason, row["fault"]


if __name__ == "__main__":
    sys.exit(run_program(CleanSpec, lambda spec, report: measured(run, session(), spec, report)))
