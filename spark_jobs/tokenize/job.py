"""Clean text to packed rows of tokens in three splits.

Which shard a document goes to, and where in it, follows from its content alone, so the same corpus
gives the same bytes under any number of partitions.

Run as a program: `python -m spark_jobs.tokenize.job --spec spec.json`.
"""

import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict
from pyspark.sql import SparkSession

from artifacts.examples import Form
from artifacts.program.entry import run_program
from spark_jobs.clean.write import NEEDED_COLUMNS
from spark_jobs.decontaminate.evaluation_texts import save_evaluation_ngrams
from spark_jobs.decontaminate.part_overlaps import PartOverlaps
from spark_jobs.decontaminate.references import Comparison, References, find_references
from spark_jobs.decontaminate.removed import DOCUMENTS_PER_LIST
from spark_jobs.runtime.parquet import Part, find_parts
from spark_jobs.runtime.scratch import scratch_folder
from spark_jobs.runtime.session import session
from spark_jobs.runtime.usage import measured
from spark_jobs.settings import HELD_OUT_IN_MEMORY, TokenizedShardsSettings
from spark_jobs.tokenize.documents import CUT, Cached, tokenize_part
from spark_jobs.tokenize.examples import check_template, find_labels
from spark_jobs.tokenize.mixing import plan_mixing
from spark_jobs.tokenize.parity import choose_engine
from spark_jobs.tokenize.receiving import count_receivers, receive
from spark_jobs.tokenize.shards import Plan
from spark_jobs.tokenize.shuffle import shuffle
from spark_jobs.tokenize.statistics import (
    refuse_missing_splits,
    refuse_too_little,
    statistics,
    write_card,
)
from spark_jobs.tokenize.survey import Survey, count_shards, survey_parts
from spark_jobs.tokenize.tokenizer import (
    Engine,
    TokenizerFiles,
    load_tokenizer,
    measure_bytes_per_token,
)

CODE_VERSION = "7"

PACKING_OF: dict[Form, str] = {
    "conversations": "best_fit",
    "pairs": "one_per_row",
    "labeled": "one_per_row",
    "preferences": "one_per_row",
}
"""How examples are packed, so that none reaches from one row into another."""


@dataclass(frozen=True)
class Made:
    """What became of all documents."""

    shards: list[dict[str, Any]]
    """What is known of each, in the order of their names."""
    removed: Counter[str]
    """Split to documents that overlap too much with reference text."""
    unused: Counter[str]
    """Reason to examples that are left out, or `CUT`."""

    @classmethod
    def of(cls, records: list[dict[str, Any]]) -> "Made":
        """From the records of `receive`."""
        shards = [record["shard"] for record in records if "shard" in record]
        made = cls(sorted(shards, key=lambda shard: shard["name"]), Counter(), Counter())
        for record in records:
            made.removed.update(record.get("removed", {}))
            made.unused.update(record.get("unused", {}))
        return made


class TokenizeSpec(BaseModel):
    """One run of this job."""

    model_config = ConfigDict(extra="forbid")

    clean_corpus: str
    """Folder of the clean corpus."""
    base_model: str
    """Folder of the base model, whose tokenizer is used."""
    output: str
    """Folder that the shards are written into."""
    settings: TokenizedShardsSettings
    form: Form = "pretraining"
    """What the corpus consists of, text to replay aside."""
    evaluation_texts: list[str] = []
    """Text files as in `clean.job.CleanSpec`, which no replayed text may overlap with."""
    cache: str | None = None
    """Folder of what earlier runs made (`artifacts.cache`); it decides speed, never results."""
    held_out_in_memory: int = HELD_OUT_IN_MEMORY
    """Most megabytes of held-out text whose n-grams every task holds (`held_out.choice`); past it
    they are joined with the other text's, and the shards are the same."""


def run(
    spark: SparkSession, spec: TokenizeSpec, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Write the shards (`artifacts.shards.format`) and return the manifest's stats.

    Returns:
        The fields of `ShardStats`, and `tokens`, `rows`, `documents` (split to count),
        `padding_fraction`, `cut_documents`, `tokens_by_source`, `absent_bytes` (bytes that the
        vocabulary cannot express), `tokenizer_engine`, `parity_sample`, `warnings`, `mixing`,
        `left_out` (reason to documents), `cut_examples`, `removed_as_overlapping_held_out` (split
        to documents).

    Raises:
        UserError: there is no clean corpus or tokenizer, a split gets no document, nothing is left
            to replay, or all training text is shorter than one row.
    """
    with scratch_folder(f"{spec.output}.scratch") as scratch:
        return _run(spark, spec, scratch, report)


def _run(
    spark: SparkSession, spec: TokenizeSpec, scratch: str, report: Callable[[str], None]
) -> dict[str, Any]:
    files = load_tokenizer(spec.base_model)
    parts = find_parts(spec.clean_corpus, NEEDED_COLUMNS, "clean_corpus")
    plan, engine, warnings, found = _plan(spark, spec, parts, files, scratch, report)
    made = _tokenize(spark, spec, parts, files, plan, engine, report)
    stats = statistics(made.shards, plan, files, engine, warnings)
    refuse_too_little(stats, plan.sequence_length)
    report(
        f"{sum(stats['tokens'].values()):,} tokens in {sum(stats['rows'].values()):,} rows "
        f"({stats['rows']['train']:,} to train on)"
    )
    stats |= found | {
        "removed_as_overlapping_held_out": dict(made.removed),
        "cut_examples": made.unused.pop(CUT, 0),
        "left_out": dict(made.unused),
    }
    write_card(spec.output, stats, spec.settings.content() | {"packing": plan.packing})
    return stats


def _plan(
    spark: SparkSession,
    spec: TokenizeSpec,
    parts: list[Part],
    files: TokenizerFiles,
    scratch: str,
    report: Callable[[str], None],
) -> tuple[Plan, Engine, list[str], dict[str, Any]]:
    """What every task is told.

    Returns:
        The plan, the engine that tokenizes, warnings about it, and what the manifest says of both.
    """
    settings = spec.settings
    start, end = files.start_and_end(settings.start_token, settings.end_token)
    survey = survey_parts(spark, parts, settings, report)
    refuse_missing_splits(survey)
    labels, counts = _check_examples(spec, parts, files)
    # The comparison with Hugging Face takes one core, while Spark's workers read held-out texts.
    with ThreadPoolExecutor(1) as background:
        choice = background.submit(choose_engine, files, settings.engine, survey.sample, spec.cache)
        mixing, mixing_record = plan_mixing(
            settings,
            survey.source_bytes,
            survey.source_documents,
            lambda: measure_bytes_per_token(files, choice.result()[0], survey.sample),
        )
        references = _find_references(spark, spec, parts, survey, scratch, report)
        engine, warnings = choice.result()
    plan = Plan(
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
        shards=count_shards(survey, files.vocab_size, settings.shard_bytes),
        lists=1 + survey.documents.total() // DOCUMENTS_PER_LIST,
    )
    found = {"parity_sample": len(survey.sample), "mixing": mixing_record, "label_counts": counts}
    return plan, engine, warnings, found


def _check_examples(
    spec: TokenizeSpec, parts: list[Part], files: TokenizerFiles
) -> tuple[tuple[str, ...], list[int]]:
    """The classes of labeled texts and the training examples of each; none of other forms.

    Raises:
        UserError: conversations cannot be rendered, or a class cannot be learnt.
    """
    if spec.form in ("conversations", "preferences"):
        check_template(files, spec.settings.examples)
    if spec.form == "labeled":
        return find_labels(parts, spec.settings.examples.labels)
    return (), []


def _find_references(
    spark: SparkSession,
    spec: TokenizeSpec,
    parts: list[Part],
    survey: Survey,
    scratch: str,
    report: Callable[[str], None],
) -> References | None:
    """The n-grams of all reference texts; None if overlap is not looked for."""
    settings = spec.settings.decontamination
    if settings.maximum_overlap == 1 and not survey.documents["replay"]:
        return None
    comparison = Comparison(
        spark=spark,
        parts=parts,
        with_held_out=survey.with_held_out,
        evaluation=save_evaluation_ngrams(spec.evaluation_texts, scratch, settings),
        overlaps=PartOverlaps.of(settings.ngram_size, spec.cache),
        scratch=scratch,
        report=report,
    )
    most = spec.held_out_in_memory * 10**6
    return find_references(comparison, survey.bytes.total(), survey.bytes["held_out"], most)


def _tokenize(
    spark: SparkSession,
    spec: TokenizeSpec,
    parts: list[Part],
    files: TokenizerFiles,
    plan: Plan,
    engine: Engine,
    report: Callable[[str], None],
) -> Made:
    """Tokenize all parts and write the shards."""
    tokenize = partial(
        tokenize_part,
        files=files,
        engine=engine,
        plan=plan,
        cache=Cached.of(spec.cache, files, engine, plan),
    )
    write = partial(receive, plan=plan)
    return Made.of(shuffle(spark, parts, tokenize, write, count_receivers(plan), report))


if __name__ == "__main__":
    sys.exit(run_program(TokenizeSpec, lambda spec, report: measured(run, session(), spec, report)))
