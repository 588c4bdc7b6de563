"""Faults of a published pipeline of the same purpose, each shown on its method and absent here.

Its method: pairs from MLlib's MinHashLSH of which those at distance 0 are filtered out, any
document of a cluster kept, and every document cut off at the sequence length.
"""

import random
from pathlib import Path

import numpy as np
import pytest
from pyspark.sql import SparkSession

from spark_jobs import clean
from spark_jobs.packing import DocumentTokens, best_fit, concatenate
from spark_jobs.settings import CleanCorpusSettings
from tests.spark_jobs.conftest import Corpus
from tests.spark_jobs.test_clean import documents

ONCE = "the pump runs at night and the pump runs at night and the pump runs at night"
TWICE = f"{ONCE} and the pump runs at night"


def shingles(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[n : n + 5]) for n in range(len(words) - 4)}


def peer_pairs(texts: list[str], threshold: float) -> set[tuple[int, int]]:
    """Pairs within a Jaccard distance, those at distance 0 left out."""
    pairs = set()
    for one in range(len(texts)):
        for other in range(one + 1, len(texts)):
            left, right = shingles(texts[one]), shingles(texts[other])
            distance = 1 - len(left & right) / len(left | right)
            if distance <= threshold and distance != 0:
                pairs.add((one, other))
    return pairs


def test_identical_shingle_sets_are_duplicates(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    assert ONCE != TWICE and shingles(ONCE) == shingles(TWICE)
    assert peer_pairs([ONCE, TWICE], 0.2) == set()

    spec = clean.CleanSpec(
        raw_corpus=raw_corpus([("once", ONCE), ("twice", TWICE)]),
        output=str(tmp_path / "clean"),
        settings=CleanCorpusSettings(minimum_characters=1),
    )
    stats = clean.run(spark, spec, lambda line: None)

    assert stats["dropped"] == {"near_duplicate": 1}
    assert documents(tmp_path / "clean").keys() == {"twice"}


def test_the_survivor_does_not_depend_on_the_order(
    spark: SparkSession, raw_corpus: Corpus, tmp_path: Path
) -> None:
    text = " ".join(f"word{number}" for number in range(80))
    copies = [(name, f"{text} {name}") for name in ("b", "longest", "a")]
    peer_survivors, survivors = set(), set()
    for number, order in enumerate((copies, copies[::-1], copies[1:] + copies[:1])):
        # Any value of a group is the first that arrives.
        peer_survivors.add(order[0][0])
        spec = clean.CleanSpec(
            raw_corpus=raw_corpus(list(order)),
            output=str(tmp_path / f"clean-{number}"),
            settings=CleanCorpusSettings(minimum_characters=1),
        )
        clean.run(spark, spec, lambda line: None)
        survivors |= documents(tmp_path / f"clean-{number}").keys()

    assert len(peer_survivors) > 1
    assert survivors == {"longest"}


@pytest.mark.parametrize("pack", [concatenate, best_fit])
def test_the_rest_of_a_long_document_is_trained_on(pack) -> None:  # type: ignore[no-untyped-def]
    generator = random.Random(0)
    lengths = [generator.randint(1, 400) for _ in range(50)]
    tokens = np.arange(1, sum(lengths) + 1, dtype=np.uint32)
    starts = np.cumsum(lengths) - np.array(lengths)

    peer = np.concatenate(
        [
            tokens[start : start + min(length, 64)]
            for start, length in zip(starts, lengths, strict=True)
        ]
    )
    rows = pack(DocumentTokens(tokens, starts), 64, padding_id=0)

    assert len(peer) < len(tokens)
    assert np.array_equal(np.sort(rows.tokens[rows.tokens > 0]), tokens)
