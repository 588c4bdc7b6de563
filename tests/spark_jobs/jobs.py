"""The jobs, run without a word to anyone, and what they made: its files and documents."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from artifacts.shards.format import ShardStats, Split
from artifacts.shards.shard_set import ShardSet
from spark_jobs.clean import job as clean
from spark_jobs.settings import CleanCorpusSettings, TokenizedShardsSettings
from spark_jobs.tokenize import job as tokenize
from tests.tiny import read_documents


def _as_given(options: dict[str, Any]) -> dict[str, Any]:
    return {key: str(one) if isinstance(one, Path) else one for key, one in options.items()}


def clean_corpus(
    spark: SparkSession,
    raw: str | Path,
    output: Path,
    settings: CleanCorpusSettings,
    **options: Any,
) -> dict[str, Any]:
    """Write a clean corpus; the options are fields of the job's specification."""
    spec = clean.CleanSpec(
        raw_corpus=str(raw), output=str(output), settings=settings, **_as_given(options)
    )
    return clean.run(spark, spec, lambda line: None)


def tokenize_corpus(
    spark: SparkSession,
    corpus: str | Path,
    model: Path,
    output: Path,
    settings: TokenizedShardsSettings,
    **options: Any,
) -> dict[str, Any]:
    """Write shards of a clean corpus; the options are fields of the job's specification."""
    spec = tokenize.TokenizeSpec(
        clean_corpus=str(corpus),
        base_model=str(model),
        output=str(output),
        settings=settings,
        **_as_given(options),
    )
    return tokenize.run(spark, spec, lambda line: None)


def clean_documents(folder: Path) -> dict[str, dict[str, Any]]:
    """The rows of a clean corpus by their ids, none of which comes twice."""
    files = sorted(folder.glob("part-*"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def splits(folder: Path, begins: str = "") -> dict[str, str]:
    """Of the documents of a clean corpus whose ids begin so, each one's split by its id."""
    found = clean_documents(folder).items()
    return {name: row["split"] for name, row in found if name.startswith(begins)}


def shard_documents(folder: Path, stats: dict[str, Any], split: Split) -> list[tuple[str, list]]:
    """The id and the tokens of each document of a split, as often as it is in the shards."""
    shards = ShardSet(folder, ShardStats(**stats), split)
    return [(str(record["id"]), tokens.tolist()) for record, tokens in read_documents(shards)]


def files_below(folder: Path) -> dict[str, bytes]:
    """The content of each file below a folder, by its path from there."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file()
    }
