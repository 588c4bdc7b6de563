"""Faults of a published pipeline of the same purpose, each shown on its method and absent here.

Its method: pairs from MLlib's MinHashLSH of which those at distance 0 are filtered out, and
any document of a cluster kept.
"""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from benchmarks import minhash_lsh
from spark_jobs.settings import CleanCorpusSettings
from tests.spark_jobs.conftest import Corpus
from tests.spark_jobs.jobs import clean_corpus, clean_documents

ONCE = "the pump runs at night and the pump runs at night and the pump runs at night"
TWICE = f"{ONCE} and the pump runs at night"


def shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[n : n + 5]) for n in range(len(words) - 4)}


def kept_by_peer(spark: SparkSession, documents: list[tuple[str, str]]) -> set[str]:
    # One partition, so that what comes first is what was written first.
    table = spark.createDataFrame(documents, "id string, text string").coalesce(1)
    distinct = minhash_lsh.distinct_texts(table).cache()
    found = minhash_lsh.kept(distinct, minhash_lsh.near_pairs(distinct))
    return {row["id"] for row in found.collect()}


def kept_by_us(spark: SparkSession, raw: str, output: Path) -> set[str]:
    clean_corpus(spark, raw, output, CleanCorpusSettings(minimum_characters=1))
    return set(clean_documents(output))


@pytest.mark.soak
def test_identical_shingle_sets_are_duplicates(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    assert ONCE != TWICE and shingles(ONCE) == shingles(TWICE)
    texts = [("once", ONCE), ("twice", TWICE)]

    assert kept_by_peer(spark, texts) == {"once", "twice"}
    assert kept_by_us(spark, raw_corpus(texts), tmp_path / "clean") == {"twice"}


@pytest.mark.soak
def test_the_survivor_does_not_depend_on_the_order(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    text = " ".join(f"word{number}" for number in range(80))
    copies = [("b", text), ("longest", text.replace(" ", "  ")), ("a", text.upper())]
    by_peer, by_us = set(), set()
    for number, order in enumerate((copies, copies[::-1])):
        by_peer.add(frozenset(kept_by_peer(spark, order)))
        raw = raw_corpus(list(order))
        by_us.add(frozenset(kept_by_us(spark, raw, tmp_path / f"clean-{number}")))

    assert len(by_peer) == 2
    assert by_us == {frozenset({"longest"})}
