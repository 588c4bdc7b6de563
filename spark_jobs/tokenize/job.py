"""Clean text to packed rows of tokens in three splits.

Which shard a document goes to, and where in it, follows from its content alone, so the same corpus
gives the same bytes under any number of partitions.

Run as a program: `python -m spark_jobs.tokenize.job --spec spec.json`. After an upgrade of a
tokenizer, `compare_tokens` says whether documents become the tokens that they were.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict
from pyspark.sql import SparkSession

from artifacts.errors import UserError, make_command
from artifacts.examples import Form, read_example
from artifacts.program.entry import run_program
from artifacts.progress import Report
from artifacts.shards.format import ALL_SPLITS, SPLITS, ShardEntry, ShardStats, token_dtype
from artifacts.shards.shard_set import ShardSet, tokens_of
from artifacts.storage import files
from artifacts.storage.files import scratch_folder
from artifacts.store.layout import SCRATCH_SUFFIX
from spark_jobs.clean.write import NEEDED_COLUMNS
from spark_jobs.decontaminate.ngrams import save_evaluation_ngrams
from spark_jobs.decontaminate.overlap import (
    PartOverlaps,
    References,
    ReferenceTexts,
    join_references,
    send_references,
)
from spark_jobs.runtime.parquet import SAMPLED, Part, find_parts, spread
from spark_jobs.runtime.session import measured, session
from spark_jobs.runtime.tasks import JobRun
from spark_jobs.settings import HELD_OUT_IN_MEMORY, TokenizedShardsSettings
from spark_jobs.tokenize.documents import CUT, tokenize_part, tokens_key
from spark_jobs.tokenize.shards import ShardPlan, receive, shuffle
from spark_jobs.tokenize.survey import (
    NOT_SAMPLED,
    CorpusSurvey,
    count_shards,
    plan_mixing,
    survey_parts,
)
from spark_jobs.tokenize.tokenizer import (
    DocumentTokenizer,
    Engine,
    ExampleTokenizer,
    TokenizerFiles,
    check_template,
    choose_engine,
    find_labels,
    load_tokenizer,
    measure_bytes_per_token,
    template_libraries,
    template_used,
)

CODE_VERSION = "14"
CARD_NAME = "README.md"

PACKING_OF: dict[Form, str] = {
    "conversations": "best_fit",
    "pairs": "one_per_row",
    "labeled": "one_per_row",
    "preferences": "one_per_row",
}
"""How examples are packed, so that none reaches from one row into another."""

DOCUMENTS_PER_LIST = 20_000_000
"""Documents of the corpus for each list of those that overlap with held-out text; of the default
corpus, 1.3% do."""


class TokenizeSpec(BaseModel):
    """One run of this job."""

    model_config = ConfigDict(extra="forbid")

    clean_corpus: str
    """Folder of the clean corpus."""
    study: str | None = None
    """Folder of the text derived from it, whose parts are as a clean corpus's."""
    base_model: str
    """Folder of the base model, whose tokenizer is used."""
    output: str
    """Folder that the shards are written into."""
    settings: TokenizedShardsSettings
    form: Form = "pretraining"
    """What the corpus consists of, plain text beside conversations aside."""
    libraries: dict[str, str] = {}
    """Versions of the libraries that decide the result; with others the program does not run."""
    evaluation_texts: list[str] = []
    """Text files as in `clean.job.CleanSpec`, which no replayed text may overlap with."""
    evaluation_sources: tuple[str, ...] = ()
    """Sources that the clean corpus's settings hold out as a whole."""
    cache: str | None = None
    """Folder of what earlier runs made (`artifacts.cache`); it decides speed, never results."""
    held_out_in_memory: int = HELD_OUT_IN_MEMORY
    """Maximum megabytes of held-out text whose n-grams every task holds (`send_references`); beyond
    it, they are joined with those of the other text (`join_references`), with the same shards."""

    def parts(self, columns: list[str]) -> list[Part]:
        """The parts of all text; raises UserError where one lacks a column."""
        derived = find_parts(self.study, columns, "study") if self.study else []
        return find_parts(self.clean_corpus, columns, "clean_corpus") + derived


def run(spark: SparkSession, spec: TokenizeSpec, report: Report = print) -> dict[str, Any]:
    """Write the shards (`artifacts.shards.format`) and return the manifest's stats.

    Returns:
        The fields of `ShardStats`, and `tokens`, `rows`, `documents` (split to count),
        `padding_fraction`, `cut_documents`, `tokens_by_source`, `absent_bytes` (bytes that the
        vocabulary cannot express), `tokenizer_engine`, `parity_sample`, `warnings`, `mixing`,
        `left_out` (reason to documents), `cut_examples`, `removed_as_overlapping_held_out` (split
        to documents).

    Raises:
        UserError: there is no clean corpus or tokenizer, a split gets no document, nothing is left
            to replay, or all training text is shorter than one row, which an example may be.
    """
    with scratch_folder(f"{spec.output}{SCRATCH_SUFFIX}") as scratch:
        return _run(JobRun(spark, report, scratch, spec.cache), spec)


def _run(job: JobRun, spec: TokenizeSpec) -> dict[str, Any]:
    files = load_tokenizer(spec.base_model)
    parts = spec.parts(NEEDED_COLUMNS)
    plan, engine, warnings, record_of_plan = _plan(job, spec, parts, files)
    tokenize = partial(
        tokenize_part,
        files=files,
        engine=engine,
        plan=plan,
        key=tokens_key(files, engine, plan),
        overlaps=PartOverlaps.of(plan.decontamination.ngram_size, spec.cache),
    )
    # Receivers are numbered from 0, and the one of `unused` is the last.
    records = shuffle(job, parts, tokenize, partial(receive, plan=plan), plan.unused + 1)
    shards = [record["shard"] for record in records if "shard" in record]
    removed, unused = Counter[str](), Counter[str]()
    for record in records:
        removed.update(record.get("removed", {}))
        unused.update(record.get("unused", {}))
    # The records of shards come in no order.
    stats = statistics(
        sorted(shards, key=lambda shard: shard["name"]), plan, files, engine, warnings
    )
    stats |= record_of_plan | {
        "removed_as_overlapping_held_out": dict(removed),
        "cut_examples": unused.pop(CUT, 0),
        "left_out": dict(unused),
    }
    refuse_too_little(stats, plan)
    job.report(
        f"{sum(stats['tokens'].values()):,} tokens in {sum(stats['rows'].values()):,} rows "
        f"({stats['rows']['train']:,} to train on)"
    )
    write_card(spec.output, stats, spec.settings.content() | {"packing": plan.packing})
    return stats


def _plan(
    job: JobRun, spec: TokenizeSpec, parts: list[Part], files: TokenizerFiles
) -> tuple[ShardPlan, Engine, list[str], dict[str, Any]]:
    """Plan the run: what every task needs to know.

    Returns:
        The plan, the engine that tokenizes, warnings about it, and what the manifest says of both.
    """
    settings = spec.settings
    start, end = files.start_and_end(settings.start_token, settings.end_token)
    survey = survey_parts(job, parts, settings)
    refuse_missing_splits(survey)
    labels: tuple[str, ...] = ()
    counts: list[int] = []
    left_out: list[str] = []
    if spec.form in ("conversations", "preferences"):
        check_template(files, settings.examples)
    # The comparison with Hugging Face takes one core, while Spark's workers read held-out texts.
    with ThreadPoolExecutor(1) as background:
        choice = background.submit(choose_engine, files, settings.engine, survey.sample, job.cache)
        mixing, mixing_record = plan_mixing(
            settings,
            survey.source_bytes,
            survey.source_documents,
            # Called for a token budget alone: it waits for the comparison.
            lambda: measure_bytes_per_token(files, choice.result()[0], survey.sample),
        )
        if spec.form == "labeled":
            labels, counts, left_out = find_labels(parts, settings.examples.labels, mixing)
        references = _find_references(job, spec, parts, survey)
        engine, warnings = choice.result()
    plan = ShardPlan(
        output=spec.output,
        sequence_length=settings.row_tokens(spec.form),
        packing=PACKING_OF.get(spec.form, settings.packing),
        form=spec.form,
        examples=settings.examples,
        labels=labels,
        vocab_size=files.vocab_size,
        start_token_id=start,
        end_token_id=end,
        references=references,
        decontamination=settings.decontamination,
        mixing=mixing,
        shards=count_shards(survey, mixing, files.vocab_size, settings.shard_bytes),
        lists=1 + survey.documents.total() // DOCUMENTS_PER_LIST,
    )
    record = {"parity_sample": len(survey.sample), "mixing": mixing_record, "label_counts": counts}
    return plan, engine, warnings + left_out, record


def refuse_missing_splits(survey: CorpusSurvey) -> None:
    """Raise UserError where a split has no document."""
    documents = sum(survey.documents.values())
    if not documents:
        raise UserError(
            "The clean corpus holds no documents, so there is nothing to tokenize. "
            f"Materialize it again: {make_command('clean_corpus')}"
        )
    own = documents - survey.documents["replay"]
    for split in SPLITS:
        if not survey.documents[split]:
            share = "" if split == "train" else f", or raise `clean_corpus.split.{split}`"
            raise UserError(
                f"None of the {own:,} clean documents falls into the {split} split: "
                f"give the corpus more documents{share}. Sources that `clean_corpus.split.sources` "
                "assigns have documents in that split alone."
            )


def _find_references(
    job: JobRun, spec: TokenizeSpec, parts: list[Part], survey: CorpusSurvey
) -> References | None:
    """The n-grams of all reference texts; None if overlap is not looked for."""
    settings = spec.settings.decontamination
    # Text to replay is compared with reference text whatever the setting says.
    if settings.maximum_overlap == 1 and not survey.documents["replay"]:
        return None
    evaluation = save_evaluation_ngrams(spec.evaluation_texts, job.scratch, settings)
    sources: list[ReferenceTexts] = [*survey.with_held_out, *([evaluation] if evaluation else [])]
    overlaps = PartOverlaps.of(settings.ngram_size, job.cache, spec.evaluation_sources)
    # Both ways give the same overlaps, so the bound is not part of the shards' identity.
    if survey.bytes["held_out"] <= spec.held_out_in_memory * 10**6:
        return send_references(job, overlaps, sources)
    return join_references(job, overlaps, sources, parts, survey.bytes.total())


def statistics(
    written: list[dict[str, Any]],
    plan: ShardPlan,
    files: TokenizerFiles,
    engine: Engine,
    warnings: list[str],
) -> dict[str, Any]:
    """The manifest's stats, from the records of the shards that were written."""

    def by_split(field: str) -> dict[str, int]:
        return {
            split: sum(row[field] for row in written if row["split"] == split) for split in splits
        }

    splits = ALL_SPLITS if "replay" in plan.shards else SPLITS
    tokens, rows = by_split("tokens"), by_split("rows")
    places = sum(rows.values()) * plan.sequence_length
    sources = Counter[str]()
    for row in written:
        sources.update(row["tokens_by_source"])
    reader = ShardStats(
        sequence_length=plan.sequence_length,
        dtype=token_dtype(files.vocab_size),
        vocab_size=files.vocab_size,
        tokenizer_sha256=files.sha256,
        start_token_id=plan.start_token_id,
        end_token_id=plan.end_token_id,
        form=plan.form,
        labels=list(plan.labels),
        target_tokens=plan.examples.target_tokens if plan.form == "pairs" else 0,
        input_prefix=plan.examples.input_prefix if plan.form == "pairs" else "",
        chat_template=template_used(files, plan.form, plan.examples),
        shards=[
            ShardEntry(**{key: row[key] for key in ShardEntry.model_fields}) for row in written
        ],
    )
    return reader.model_dump() | {
        "tokens": tokens,
        "rows": rows,
        "documents": by_split("documents"),
        "padding_fraction": round(1 - sum(tokens.values()) / places, 6) if places else 0.0,
        "cut_documents": sum(row["cut_documents"] for row in written),
        "tokens_by_source": dict(sorted(sources.items())),
        "absent_bytes": sum(row["absent"] for row in written),
        "tokenizer_engine": engine,
        "warnings": warnings,
    }


def refuse_too_little(stats: dict[str, Any], plan: ShardPlan) -> None:
    """Raise UserError where nothing is left to train on or to replay."""
    if stats["documents"].get("replay") == 0:
        raise UserError(
            "Every document to replay (`clean_corpus.split.sources`) overlaps with evaluation "
            "text, so nothing is left to replay. Name another source of general text, or split its "
            "documents into smaller ones."
        )
    # An example with a row of its own is learnt however short it is.
    has_own_row = plan.packing == "one_per_row"
    if stats["tokens"]["train"] < (1 if has_own_row else plan.sequence_length):
        left_out = dict(stats["left_out"])
        if overlapping := stats["removed_as_overlapping_held_out"].get("train"):
            left_out["overlaps held-out text"] = overlapping
        counts = ", ".join(f"{reason}: {count:,}" for reason, count in left_out.items())
        sampled = " raise what `tokenized_shards.mixing` and `fraction` take of it,"
        change = "lower `tokenized_shards.sequence_length`"
        if has_own_row:
            change = "let longer ones in (`tokenized_shards.examples`)"
        raise UserError(
            f"All training text together is {stats['tokens']['train']:,} tokens, shorter than one "
            f"row of {plan.sequence_length}"
            + (f"; documents that were left out: {counts}" if counts else "")
            + f". Give the corpus more text,{sampled if NOT_SAMPLED in left_out else ''} or "
            f"{change}."
        )


def write_card(output: str, stats: dict[str, Any], settings: dict[str, Any]) -> None:
    """Write the card; it follows from the shards' content alone."""
    splits = [
        f"| {split} | {stats['documents'][split]:,} | {stats['tokens'][split]:,} "
        f"| {stats['rows'][split]:,} |"
        for split in stats["documents"]
    ]
    sources = [f"| {name} | {count:,} |" for name, count in stats["tokens_by_source"].items()]
    weights = stats["mixing"]["weights"] or "each source once"
    removed = sum(stats["removed_as_overlapping_held_out"].values())
    # The engine is not named: either one makes the same shards, so the card must be the same, too.
    card = "\n".join(
        [
            "# Packed token rows",
            "",
            f"Rows of {stats['sequence_length']} tokens ({stats['dtype']}, little-endian), packed "
            f"by `{settings['packing']}`, {stats['padding_fraction']:.2%} padding. "
            f"{stats['cut_documents']:,} documents lie in more than one segment; none is cut off.",
            "",
            "| split | documents | tokens | rows |",
            "|---|---|---|---|",
            *splits,
            "",
            "`train` is for training, `validation` for choosing, `held_out` for the gate alone. "
            "Near-copies never lie in two splits.",
            "",
            "| source | tokens |",
            "|---|---|",
            *sources,
            "",
            f"- Mixing: {weights}; {settings['fraction']:.0%} of the training documents.",
            f"- Left out because they repeat held-out text: {removed:,} documents, listed in "
            "`overlaps_held_out-NNNNN.parquet`.",
            f"- Tokenizer SHA-256 {stats['tokenizer_sha256']}, vocabulary {stats['vocab_size']:,}, "
            f"start token {stats['start_token_id']}, end token {stats['end_token_id']}. "
            f"{stats['absent_bytes']:,} bytes of the text have no token and are not in the rows.",
            "- Special-token strings in the text are plain text.",
            "",
            "`manifest.json` names the clean corpus and the base model that this was made from.",
            "",
        ]
    )
    files.write(f"{output}/{CARD_NAME}", card.encode())


def libraries_of(settings: TokenizedShardsSettings, form: Form) -> set[str]:
    """The libraries that decide the shards, whichever of the two engines is asked for."""
    used = {"gigatoken", "pyarrow", "tokenizers"}
    return used | template_libraries(form, settings.examples)


def compare_tokens(
    spec: TokenizeSpec, shards: str, stats: dict[str, Any]
) -> Iterator[tuple[str, object, object]]:
    """Compare a few documents of each split: id, tokens in the shards, and tokens now.

    Args:
        shards: folder of the shards that were made by the same specification.
        stats: theirs.
    """
    reader, files = ShardStats.model_validate(stats), load_tokenizer(spec.base_model)
    tokenizer = DocumentTokenizer(files, stats["tokenizer_engine"])
    examples = ExampleTokenizer(
        files,
        reader.form,
        spec.settings.examples,
        reader.sequence_length,
        reader.end_token_id,
        tuple(reader.labels),
    )
    parts = spec.parts(["id", "text"])
    documents = spread(parts, ["id", "text", "example"])
    for split in SPLITS:
        shard = ShardSet(shards, reader, split).shard(0)
        shard_ids = shard.documents(["id"])["id"].combine_chunks()
        in_both = documents.filter(pc.is_in(documents["id"], shard_ids)).slice(0, SAMPLED)
        numbers = pc.index_in(in_both["id"], shard_ids).to_numpy()
        for row, tokens in zip(in_both.to_pylist(), tokens_of(shard, numbers), strict=True):
            if row.get("example") is None:
                # The shards also have start and end tokens, which `encode` does not add.
                tokens, (now, _) = tokens[1:-1], tokenizer.encode(pa.array([row["text"]]))
            else:
                now = examples.encode(read_example(row["example"]), row["id"]).tokens
            yield row["id"], tokens.tolist(), now.tolist()


if __name__ == "__main__":
    sys.exit(run_program(TokenizeSpec, lambda spec, report: measured(run, session(), spec, report)))
