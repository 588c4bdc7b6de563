"""Text to replay: kept apart from every split, and free of the text that judges."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from artifacts.shards import SPLITS, ShardSet, ShardStats, read_documents
from spark_jobs import tokenize
from spark_jobs.settings import SplitSettings, TokenizedShardsSettings
from spark_jobs.split import Splitter
from spark_jobs.text import cluster_hash
from tests.spark_jobs.splits import split_of
from tests.tiny import tiny_texts

SETTINGS = TokenizedShardsSettings(
    sequence_length=64, split=SplitSettings(validation=0.15, held_out=0.15), replay=["general"]
)
JUDGING = " ".join(f"judging{number}" for number in range(40))
"""What evaluation measures forgetting on."""


def general(number: int) -> str:
    return " ".join(f"general{number}word{place}" for place in range(80))


def run(
    spark: SparkSession,
    model: Path,
    folder: Path,
    general_texts: list[str],
    settings: TokenizedShardsSettings = SETTINGS,
) -> dict:
    texts = [*tiny_texts(150), *general_texts]
    sources = ["manual"] * 150 + ["general"] * len(general_texts)
    (folder / "clean").mkdir()
    table = pa.table(
        {
            "id": [f"{source}/{number}" for number, source in enumerate(sources)],
            "text": texts,
            "source": sources,
            "cluster": [cluster_hash(text, 0) for text in texts],
            "bytes": [len(text.encode()) for text in texts],
            "pinned": pa.array([False] * len(texts), pa.bool_()),
        }
    )
    pq.write_table(table, folder / "clean" / "part-00000.parquet")
    (folder / "judging.txt").write_text(JUDGING)
    spec = tokenize.TokenizeSpec(
        clean_corpus=str(folder / "clean"),
        base_model=str(model),
        output=str(folder / "shards"),
        settings=settings,
        evaluation_texts=[str(folder / "judging.txt")],
    )
    return tokenize.run(spark, spec, lambda line: None)


def documents(folder: Path, stats: dict, split: str) -> set[str]:
    shards = ShardSet(folder / "shards", ShardStats(**stats), split)  # type: ignore[arg-type]
    return {str(record["id"]) for record, _ in read_documents(shards)}


def test_replayed_sources_are_in_no_other_split_and_hold_nothing_that_judges(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    sound = [general(number) for number in range(30)]
    excerpt = " ".join(JUDGING.split()[10:25])
    quoting = f"{general(100)} {excerpt} {general(101)}"
    held_out_manual = next(
        text
        for text in tiny_texts(150)
        if split_of(cluster_hash(text, 0), SETTINGS.split) == "held_out" and text.count(" ") > 40
    )
    repeating = f"{general(102)} {' '.join(held_out_manual.split()[5:30])}"

    stats = run(spark, model_folder, tmp_path, [*sound, quoting, repeating])

    replayed = {f"general/{150 + number}" for number in range(30)}
    assert documents(tmp_path, stats, "replay") == replayed
    assert any(split_of(cluster_hash(text, 0), SETTINGS.split) == "held_out" for text in sound)
    for split in SPLITS:
        found = documents(tmp_path, stats, split)
        assert found and all(name.startswith("manual/") for name in found)
    assert stats["documents"]["replay"] == 30
    assert stats["removed_as_overlapping_held_out"]["replay"] == 2
    assert stats["tokens_by_source"]["general"] == stats["tokens"]["replay"]


def test_replayed_text_that_all_judges_is_refused(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"Every document of general.*nothing is left to replay"):
        run(spark, model_folder, tmp_path, [f"{general(0)} {JUDGING}"])


def test_an_unknown_source_to_replay_is_named(
    spark: SparkSession, model_folder: Path, tmp_path: Path
) -> None:
    settings = SETTINGS.model_copy(update={"replay": ["generall"]})

    with pytest.raises(UserError, match=r"`tokenized_shards.replay`.*'generall'.*general, manual"):
        run(spark, model_folder, tmp_path, [general(0)], settings)


def test_a_pinned_document_stays_held_out_when_its_source_is_replayed() -> None:
    rows = pa.table(
        {
            "cluster": ["0" * 32, "f" * 32, "f" * 32],
            "pinned": [False, True, False],
            "source": ["general"] * 3,
        }
    )

    rows = Splitter(SETTINGS.split, True, frozenset({"general"})).add_split(rows)

    assert rows["split"].to_pylist() == ["replay", "held_out", "replay"]
