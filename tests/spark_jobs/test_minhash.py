"""Shingles, signatures and bands say what the definitions say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.clean.prepare import Bands, derive_bands, signatures
from spark_jobs.text import fold, shingle, sum_words

WORDS = 5
words = st.lists(st.sampled_from(["a", "bb", "é", "valve", "x1", "日本"]), max_size=30)


def defined(text: str) -> set[tuple[str, ...]]:
    split = text.replace("日本", "日 本").split()
    return {tuple(split[n : n + WORDS]) for n in range(max(1, len(split) - WORDS + 1))}


@given(st.lists(words, min_size=1, max_size=12))
def test_shingle_sets_have_the_similarity_of_the_word_sets(texts: list[list[str]]) -> None:
    folded = [fold(" ".join(text)) for text in texts]
    shingles = shingle(sum_words(folded), WORDS)
    sets = [
        set(shingles.hashes[first:last].tolist())
        for first, last in zip(shingles.offsets[:-1], shingles.offsets[1:], strict=True)
    ]

    for text, one in zip(folded, sets, strict=True):
        for other_text, other in zip(folded, sets, strict=True):
            assert len(one & other) == len(defined(text) & defined(other_text))
            assert len(one | other) == len(defined(text) | defined(other_text))


def test_signatures_estimate_the_similarity() -> None:
    generator = np.random.default_rng(3)
    errors = []
    for share in (0.3, 0.6, 0.9):
        for _ in range(40):
            common = [f"w{n}" for n in generator.integers(0, 10**9, 400)]
            cut = int(len(common) * share)
            others = [f"v{n}" for n in generator.integers(0, 10**9, len(common) - cut)]
            texts = [" ".join(common), " ".join(common[:cut] + others)]
            one, other = (defined(text) for text in texts)
            signature = signatures(shingle(sum_words(texts), WORDS), 126)
            estimate = (signature[0] == signature[1]).mean()
            errors.append(estimate - len(one & other) / len(one | other))

    assert abs(np.mean(errors)) < 0.01
    assert np.std(errors) < 1.3 * np.sqrt(0.25 / 126)


@pytest.mark.parametrize("threshold", [0.5, 0.7, 0.8, 0.9])
def test_bands_find_nearly_every_pair_at_the_threshold(threshold: float) -> None:
    bands = derive_bands(threshold, 126)

    assert bands.permutations <= 126
    assert bands.candidate_probability(threshold) >= 0.995
    coarser = Bands(126 // (bands.rows + 1), bands.rows + 1)
    assert coarser.candidate_probability(threshold) < 0.995
