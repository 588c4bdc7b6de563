"""Near-copies are found by their true similarity, whatever the order of the documents."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.clean.decide.near_copies import (
    NearDuplicates,
    comparison,
    find_near_duplicates,
    remember_pairs,
)
from spark_jobs.clean.prepare import band_keys, derive_bands, signatures
from spark_jobs.settings import NearDuplicateSettings
from spark_jobs.text import shingle, sum_words

THRESHOLD = 0.8


def cluster(texts: list[str]) -> tuple[NearDuplicates, list[set[int]]]:
    bands = derive_bands(THRESHOLD, 126)
    shingles = shingle(sum_words(texts), 5)
    signed = signatures(shingles, bands.permutations)
    sets = [
        np.unique(shingles.hashes[first:last])
        for first, last in zip(shingles.offsets[:-1], shingles.offsets[1:], strict=True)
    ]
    compare = comparison(
        lambda numbers: signed[numbers],
        lambda numbers: [sets[number] for number in numbers],
        THRESHOLD,
    )
    found = find_near_duplicates(band_keys(signed, bands), compare, THRESHOLD)
    return found, [set(one.tolist()) for one in sets]


def similarity(one: set[int], other: set[int]) -> float:
    return len(one & other) / len(one | other)


def edited(text: str, share: float, generator: random.Random) -> str:
    words = text.split()
    for place in generator.sample(range(len(words)), round(share * len(words))):
        words[place] = f"edit{generator.randrange(10**6)}"
    return " ".join(words)


def families(count: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    texts = []
    for _ in range(count):
        words = [f"w{generator.randrange(10**6)}" for _ in range(generator.randint(40, 300))]
        original = " ".join(words)
        texts += [original]
        texts += [edited(original, generator.uniform(0, 0.1), generator) for _ in range(3)]
    return texts


def cluster_families(seed: int) -> tuple[NearDuplicates, list[set[int]], set[tuple[int, int]]]:
    """What `cluster` finds in families, and the pairs of texts that are near-copies."""
    texts = list(dict.fromkeys(families(12, seed)))
    found, sets = cluster(texts)
    pairs = {
        (one, other)
        for one in range(len(texts))
        for other in range(one + 1, len(texts))
        if similarity(sets[one], sets[other]) >= THRESHOLD
    }
    return found, sets, pairs


@settings(max_examples=15)
@given(st.integers(0, 10**6))
def test_every_edge_is_true(seed: int) -> None:
    found, sets, _ = cluster_families(seed)
    for left, right, stated in zip(
        found.edges.left, found.edges.right, found.edges.similarity, strict=True
    ):
        assert stated == similarity(sets[left], sets[right]) >= THRESHOLD


def test_hardly_any_pair_is_missed() -> None:
    # Each may be missed by chance, and one of nine is many: so a few hundred, the same each time.
    connected = count = 0
    for seed in range(30):
        found, _, pairs = cluster_families(seed)
        connected += sum(found.component[one] == found.component[other] for one, other in pairs)
        count += len(pairs)
    print(f"{connected} of {count}")
    assert count > 200 and connected >= 0.99 * count


def test_texts_of_the_same_shingles_are_copies_though_one_says_it_more_often() -> None:
    once = "the pump runs at night and the pump runs at night and the pump runs at night"
    found, (one, other) = cluster([once, f"{once} and the pump runs at night"])

    assert one == other and found.component[0] == found.component[1]


def test_a_large_bucket_stays_affordable_and_complete() -> None:
    generator = random.Random(1)
    body = " ".join(f"w{number}" for number in range(200))
    texts = [f"{body} {generator.randrange(10**9)}" for _ in range(3_000)]
    found, _ = cluster(texts)

    assert set(found.component.tolist()) == {found.component[0]}
    # Everything is connected by the first star of each bucket, so no other pair is looked at.
    assert found.candidates < 30 * len(texts)


def test_documents_of_a_bucket_may_be_like_each_other_and_not_like_its_first() -> None:
    one_bucket = np.zeros((3, 1), np.uint64)
    similarities = {(0, 1): 0.5, (0, 2): 0.5, (1, 2): 0.9}

    def compare(pairs: np.ndarray) -> np.ndarray:
        return np.array([similarities[left, right] for left, right in pairs.tolist()])

    found = find_near_duplicates(one_bucket, compare, THRESHOLD)

    assert found.component[1] == found.component[2] != found.component[0]
    assert found.candidates == found.verified == 3


@pytest.mark.soak
def test_the_components_step_holds_at_100_million_edges_on_one_machine() -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (10 * 10**9, 10 * 10**9))
import numpy as np
from spark_jobs.clean.decide.near_copies import Edges, components
count = 100_000_000
left = np.random.default_rng(0).integers(0, count, count)
edges = Edges(left, np.minimum(left + 1, count - 1), np.broadcast_to(1.0, count))
print(len(components(edges, count)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)

    assert done.stdout.strip() == "100000000", done.stderr


def test_pairs_of_texts_that_were_compared_before_are_not_compared_again(tmp_path: Path) -> None:
    generator = np.random.default_rng(7)
    texts = generator.integers(0, 256, (6, 16), np.uint8)
    similarity = generator.random((6, 6))
    similarity[1, 4] = np.nan
    asked: list[tuple[int, int]] = []

    def compare(numbers: list[int], pairs: list[tuple[int, int]]) -> list[float]:
        """Pairs of a run that numbers the texts in this way."""

        def compute(pairs: np.ndarray) -> np.ndarray:
            asked.extend((numbers[low], numbers[high]) for low, high in pairs.tolist())
            low, high = np.array(numbers)[pairs].T
            return similarity[low, high]

        remembered = remember_pairs(
            compute, texts[numbers], NearDuplicateSettings(), str(tmp_path / "cache")
        )
        return remembered(np.array(pairs, int).reshape(-1, 2)).tolist()

    assert compare([0, 1, 4], []) == [] and not asked
    first = compare([0, 1, 4], [(0, 1), (1, 2)])
    assert first[0] == similarity[0, 1] and np.isnan(first[1])
    assert asked == [(0, 1), (1, 4)]

    second = compare([0, 1, 2, 3, 4], [(0, 2), (0, 1), (1, 4)])
    assert second[:2] == [similarity[0, 2], similarity[0, 1]] and np.isnan(second[2])
    assert asked == [(0, 1), (1, 4), (0, 2)]
