"""Clean text to packed rows of tokens in three splits.

Which shard a document goes to, and where in it, follows from its content alone, so the same corpus
gives the same bytes under any number of partitions.

Run as a program: `python -m spark_jobs.tokenize --spec spec.json`.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import fsspec
from pydantic import BaseModel, ConfigDict
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.shards import ALL_SPLITS, SPLITS, ShardEntry, ShardStats, token_dtype
from spark_jobs import entry
from spark_jobs.card import write_card
from spark_jobs.decisions import CLEAN_SCHEMA
from spark_jobs.evaluation_texts import keep_evaluation_runs
from spark_jobs.exchange import Range, read_ranges
from spark_jobs.held_out_runs import keep_held_out_runs
from spark_jobs.kept import remove_others
from spark_jobs.mixing import plan_mixing
from spark_jobs.parquet import Part, find_parts, write_table
from spark_jobs.settings import TokenizedShardsSettings
from spark_jobs.shard_writer import Plan, write_shard_of
from spark_jobs.survey import Survey, survey_parts
from spark_jobs.tasks import count_tasks, map_tasks
from spark_jobs.token_parts import REMOVED, REMOVED_NAME, tokenise_parts
from spark_jobs.tokenizer import (
    Engine,
    TokenizerFiles,
    choose_engine,
    load_tokenizer,
    measure_bytes_per_token,
)

CODE_VERSION = "4"

BYTES_PER_TOKEN = 4
"""Rough length of a token in text, which only decides into how many shards a split is cut."""


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
    evaluation_texts: list[str] = []
    """Text files as in `spark_jobs.clean.CleanSpec`, which no replayed text may overlap with."""
    cache: str | None = None
    """Folder that keeps tokens for the next run; it decides speed, never the result."""


def run(
    spark: SparkSession, spec: TokenizeSpec, report: Callable[[str], None] = print
) -> dict[str, Any]:
    """Write the shards (`artifacts.shards`) and return the manifest's stats.

    Returns:
        The fields of `ShardStats`, and `tokens`, `rows`, `documents` (split to count),
        `padding_fraction`, `cut_documents`, `tokens_by_source`, `absent_bytes` (bytes that the
        vocabulary cannot express), `tokenizer_engine`, `parity_sample`, `warnings`, `mixing`,
        `removed_as_overlapping_held_out` (split to documents), `pinned_held_out` (documents).

    Raises:
        UserError: there is no clean corpus or tokenizer, a split gets no document, a source to
            replay is unknown or has nothing left, or all training text is shorter than one row.
    """
    settings = spec.settings
    files = load_tokenizer(spec.base_model)
    start, end = files.start_and_end(settings.start_token, settings.end_token)
    parts = find_parts(spec.clean_corpus, CLEAN_SCHEMA.names, "clean_corpus")
    scratch = f"{spec.output}.scratch"
    folder = spec.cache or scratch
    survey = survey_parts(parts, settings)
    _refuse_unknown_replay(survey, settings)
    _refuse_missing_splits(survey, settings)
    # The comparison with Hugging Face takes one core, while Spark's workers read held-out texts.
    with ThreadPoolExecutor(1) as background:
        choice = background.submit(choose_engine, files, settings.engine, survey.sample)
        mixing, mixing_record = plan_mixing(
            settings,
            survey.source_bytes,
            lambda: measure_bytes_per_token(files, choice.result()[0], survey.sample),
        )
        runs = _keep_judging_runs(spark, spec, parts, survey, folder, report)
        engine, warnings = choice.result()
    plan = Plan(
        output=spec.output,
        sequence_length=settings.sequence_length,
        packing=settings.packing,
        vocab_size=files.vocab_size,
        start_token_id=start,
        end_token_id=end,
        runs=runs[0] if runs else None,
        decontamination=settings.decontamination,
        mixing=mixing,
        splitter=survey.splitter,
        shards={
            split: max(1, round(size / BYTES_PER_TOKEN * _item_bytes(files) / settings.shard_bytes))
            for split, size in survey.bytes.items()
        },
    )
    exchange = f"{scratch}/exchange"
    tokenise = partial(
        tokenise_parts, files=files, engine=engine, plan=plan, exchange=exchange, folder=spec.cache
    )
    sent = _tokenise(spark, parts, tokenise, engine, report)
    ranges = _by_shard(sent)
    removed = _list_removed(spec.output, ranges.pop(REMOVED, []))
    written = _write_shards(spark, ranges, plan, report)
    stats = _stats(written, plan, files, engine, warnings)
    _refuse_too_little(stats, settings)
    if spec.cache:
        remove_others(spec.cache, [*runs, *(url for record in sent for url in record["kept"])])
    _remove(scratch)
    report(
        f"{sum(stats['tokens'].values()):,} tokens in {sum(stats['rows'].values()):,} rows "
        f"({stats['rows']['train']:,} to train on)"
    )
    stats |= {
        "parity_sample": len(survey.sample),
        "mixing": mixing_record,
        "removed_as_overlapping_held_out": removed,
        "pinned_held_out": survey.pinned,
    }
    write_card(spec.output, stats, settings.content())
    return stats


def _keep_judging_runs(
    spark: SparkSession,
    spec: TokenizeSpec,
    parts: list[Part],
    survey: Survey,
    folder: str,
    report: Callable[[str], None],
) -> list[str]:
    """Keep the word runs of all texts that judge, as `keep_held_out_runs`; none if not wanted."""
    settings = spec.settings
    if settings.decontamination.maximum_overlap == 1 and not settings.replay:
        return []
    judging = keep_evaluation_runs(spec.evaluation_texts, folder, settings.decontamination)
    held_out = list(zip(parts, survey.held_out, strict=True))
    words = settings.decontamination.run_words
    return keep_held_out_runs(spark, held_out, words, folder, report, judging)


def _tokenise(
    spark: SparkSession,
    parts: list[Part],
    tokenise: Callable[[list[Part]], dict[str, Any]],
    engine: Engine,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Tokenise all parts, many of them in a piece of work; the records of those."""
    tasks = count_tasks(len(parts), spark.sparkContext.defaultParallelism)
    groups = [parts[task::tasks] for task in range(tasks)]
    return map_tasks(spark, f"tokenising with {engine}", groups, tokenise, report)


def _by_shard(sent: list[dict[str, Any]]) -> dict[int, list[Range]]:
    """Where the documents of each shard are, from what every piece of work has sent."""
    ranges: dict[int, list[Range]] = defaultdict(list)
    for record in sent:
        for shard, found in record["ranges"].items():
            ranges[shard] += found
    return ranges


def _list_removed(output: str, ranges: list[Range]) -> dict[str, int]:
    """List the documents that overlap too much with text that judges beside the shards.

    Returns:
        The split that they were of, to how many.
    """
    if not ranges:
        return {}
    removed = read_ranges(ranges).sort_by("id")
    write_table(f"{output}/{REMOVED_NAME}", removed)
    return dict(Counter(removed["split"].to_pylist()))


def _write_shards(
    spark: SparkSession,
    ranges: dict[int, list[Range]],
    plan: Plan,
    report: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Bring each shard's documents together and write it.

    Returns:
        What is known of each shard, in the order of their names.
    """
    write = partial(write_shard_of, plan=plan)
    written = map_tasks(spark, "writing shards", sorted(ranges.items()), write, report)
    return sorted(written, key=lambda shard: shard["name"])


def _remove(folder: str) -> None:
    filesystem, path = fsspec.core.url_to_fs(folder)
    filesystem.rm(path, recursive=True)


def _refuse_missing_splits(survey: Survey, settings: TokenizedShardsSettings) -> None:
    documents = sum(survey.documents.values())
    if not documents:
        raise UserError(
            "The clean corpus holds no documents, so there is nothing to tokenise. "
            'Materialize it again: dagster asset materialize --select "*clean_corpus"'
        )
    for split in SPLITS:
        if not survey.documents[split]:
            share = (
                ""
                if split == "train"
                else f", or raise `tokenized_shards.split.{split}` "
                f"(now {getattr(settings.split, split)})"
            )
            raise UserError(
                f"None of the {documents:,} clean documents falls into the {split} split: "
                f"give the corpus more documents{share}."
            )


def _refuse_unknown_replay(survey: Survey, settings: TokenizedShardsSettings) -> None:
    unknown = sorted(set(settings.replay) - survey.sources)
    if unknown:
        raise UserError(
            f"`tokenized_shards.replay` names the source {unknown[0]!r}, of which the clean corpus "
            f"has no text; its sources are {', '.join(sorted(survey.sources))}."
        )


def _item_bytes(files: TokenizerFiles) -> int:
    return 2 if token_dtype(files.vocab_size) == "uint16" else 4


def _stats(
    written: list[dict[str, Any]],
    plan: Plan,
    files: TokenizerFiles,
    engine: Engine,
    warnings: list[str],
) -> dict[str, Any]:
    def by_split(field: str) -> dict[str, int]:
        return {
            split: sum(row[field] for row in written if row["split"] == split) for split in splits
        }

    splits = ALL_SPLITS if plan.splitter.replay else SPLITS
    tokens, rows = by_split("tokens"), by_split("rows")
    places = sum(rows.values()) * plan.sequence_length
    sources: dict[str, int] = {}
    for row in written:
        for source, count in row["tokens_by_source"].items():
            sources[source] = sources.get(source, 0) + count
    reader = ShardStats(
        sequence_length=plan.sequence_length,
        dtype=token_dtype(files.vocab_size),
        vocab_size=files.vocab_size,
        tokenizer_sha256=files.sha256,
        start_token_id=plan.start_token_id,
        end_token_id=plan.end_token_id,
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


def _refuse_too_little(stats: dict[str, Any], settings: TokenizedShardsSettings) -> None:
    if settings.replay and not stats["documents"]["replay"]:
        raise UserError(
            f"Every document of {', '.join(settings.replay)} (`tokenized_shards.replay`) overlaps "
            "with text that judges, so nothing is left to replay. Name another source of general "
            "text, or cut its documents smaller."
        )
    if stats["tokens"]["train"] < settings.sequence_length:
        raise UserError(
            f"All training text together is {stats['tokens']['train']:,} tokens, shorter than one "
            f"row of {settings.sequence_length}. Give the corpus more text, or lower "
            "`tokenized_shards.sequence_length`."
        )


if __name__ == "__main__":
    sys.exit(entry.main(TokenizeSpec, run))
