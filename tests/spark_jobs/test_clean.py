"""The cleaning job, through its own door: folders in, folders and counts out."""

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from artifacts.errors import UserError
from spark_jobs import clean
from spark_jobs.settings import CleanCorpusSettings
from tests.spark_jobs.conftest import Corpus, spark_settings
from tests.tiny import tiny_texts

SETTINGS = CleanCorpusSettings(minimum_characters=40, maximum_characters=5_000)


def run(
    spark: SparkSession, raw: str, output: Path, settings: CleanCorpusSettings = SETTINGS
) -> dict:
    spec = clean.CleanSpec(raw_corpus=raw, output=str(output), settings=settings)
    return clean.run(spark, spec, lambda line: None)


def documents(folder: Path) -> dict[str, dict]:
    rows = [row for file in folder.glob("part-*") for row in pq.read_table(file).to_pylist()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}


def test_every_dropped_document_is_counted_under_its_reason(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    text = "A valve opens before start-up and closes at the end of the week."
    raw = raw_corpus(
        [
            ("kept", text),
            ("copy", text.upper().replace(" ", "  ")),
            ("control", "\x00\x07 "),
            ("short", "A pump."),
            ("long", "word " * 2_000),
        ]
    )

    stats = run(spark, raw, tmp_path / "clean")

    # `copy` is longer once its spaces count, so it survives.
    assert documents(tmp_path / "clean").keys() == {"copy"}
    assert stats["dropped"] == {"empty": 1, "exact_duplicate": 1, "too_long": 1, "too_short": 1}
    assert stats["documents"] + sum(stats["dropped"].values()) == stats["documents_read"] == 5
    assert stats["dropped_examples"]["too_short"] == [{"id": "short", "text": "A pump."}]


def test_the_survivor_is_the_longest_then_the_smallest_id_under_any_partitioning(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    originals = tiny_texts(60)
    copies = [
        (f"{number:03d}-{copy}", text if copy else text.replace(". ", ".  "))
        for number, text in enumerate(originals)
        for copy in "abc"[: 1 + number % 3]
    ]
    expected = {}
    for identifier, text in sorted(copies):
        number = identifier[:3]
        if number not in expected or len(text) > len(expected[number][1]):
            expected[number] = (identifier, text)

    found = []
    for seed, partitions in ((0, 1), (1, 5)):
        random.Random(seed).shuffle(copies)
        with spark_settings(spark, shuffle__partitions=partitions):
            run(spark, raw_corpus(copies), tmp_path / f"clean-{partitions}")
        found.append(documents(tmp_path / f"clean-{partitions}"))

    assert found[0] == found[1]
    assert found[0].keys() == {identifier for identifier, _ in expected.values()}


def test_an_id_that_comes_twice_is_named(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    raw = raw_corpus([("a", "x" * 50), ("a", "y" * 50), ("b", "z" * 50)])

    with pytest.raises(UserError, match=r"'a' \(2 times\).*id_column"):
        run(spark, raw, tmp_path / "clean")


def test_a_corpus_with_nothing_left_says_what_was_dropped(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"too_short: 2.*minimum_characters.*40"):
        run(spark, raw_corpus([("a", "x"), ("b", "y")]), tmp_path / "clean")


def test_a_missing_corpus_and_a_missing_column_are_named(
    spark: SparkSession, tmp_path: Path, raw_corpus: Corpus
) -> None:
    with pytest.raises(UserError, match=r"raw_corpus.*dagster asset materialize"):
        run(spark, str(tmp_path / "absent"), tmp_path / "clean")

    raw = Path(raw_corpus([("a", "x" * 50)]))
    file = raw / "part-00000.parquet"
    pq.write_table(pq.read_table(file).drop_columns("source"), file)
    with pytest.raises(UserError, match=r"part-00000.parquet.*no column 'source'"):
        run(spark, str(raw), tmp_path / "clean")
