"""Text to replay: kept apart from every split, and free of the text that judges."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.shards.format import SPLITS, Split
from spark_jobs.settings import SplitSettings, TokenizedShardsSettings
from spark_jobs.text import text_hash
from tests.spark_jobs.jobs import shard_documents, tokenize_corpus
from tests.spark_jobs.splits import clean_table, split_of
from tests.tiny import tiny_texts

SPLIT = SplitSettings(validation=0.15, held_out=0.15)
SETTINGS = TokenizedShardsSettings(sequence_length=64)
JUDGING = " ".join(f"judging{number}" for number in range(40))
"""What evaluation measures forgetting on."""


def general(number: int) -> str:
    return " ".join(f"general{number}word{place}" for place in range(80))


def run(spark: SparkSession, model: Path, folder: Path, general_texts: list[str]) -> dict:
    texts = [*tiny_texts(150), *general_texts]
    sources = ["manual"] * 150 + ["general"] * len(general_texts)
    (folder / "clean").mkdir()
    ids = [f"{source}/{number}" for number, source in enumerate(sources)]
    table = clean_table(ids, texts, sources, SPLIT)
    pq.write_table(table, folder / "clean" / "part-00000.parquet")
    (folder / "judging.txt").write_text(JUDGING)
    return tokenize_corpus(
        spark,
        folder / "clean",
        model,
        folder / "shards",
        SETTINGS,
        evaluation_texts=[str(folder / "judging.txt")],
    )


def documents(folder: Path, stats: dict, split: Split) -> set[str]:
    return {name for name, _ in shard_documents(folder / "shards", stats, split)}


def test_replayed_sources_are_in_no_other_split_and_hold_nothing_that_judges(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    sound = [general(number) for number in range(30)]
    excerpt = " ".join(JUDGING.split()[10:25])
    quoting = f"{general(100)} {excerpt} {general(101)}"
    held_out_manual = next(
        text
        for text in tiny_texts(150)
        if split_of(text_hash(text), SPLIT) == "held_out" and text.count(" ") > 40
    )
    repeating = f"{general(102)} {' '.join(held_out_manual.split()[5:30])}"

    stats = run(spark, model_folder, tmp_path, [*sound, quoting, repeating])

    replayed = {f"general/{150 + number}" for number in range(30)}
    assert documents(tmp_path, stats, "replay") == replayed
    assert any(split_of(text_hash(text), SPLIT) == "held_out" for text in sound)
    for split in SPLITS:
        found = documents(tmp_path, stats, split)
        assert found and all(name.startswith("manual/") for name in found)
    assert stats["documents"]["replay"] == 30
    assert stats["removed_as_overlapping_held_out"]["replay"] == 2
    assert stats["tokens_by_source"]["general"] == stats["tokens"]["replay"]


def test_replayed_text_that_all_judges_is_refused(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"Every document to replay.*nothing is left to replay"):
        run(spark, model_folder, tmp_path, [f"{general(0)} {JUDGING}"])
