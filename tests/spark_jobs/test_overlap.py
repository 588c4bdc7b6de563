"""What a text has in common with texts that must not be trained on, by the definition."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.minhash import sum_words
from spark_jobs.overlap import Runs, join_runs, load_runs, overlaps, save_runs, word_runs

RUN = 3
texts = st.lists(
    st.lists(st.sampled_from(list("abcde")), min_size=1, max_size=12).map(" ".join),
    min_size=1,
    max_size=6,
)


def overlap(documents: list[str], runs: Runs) -> list[float]:
    return overlaps(sum_words(documents), RUN, runs).tolist()


def defined(document: str, references: list[str]) -> float:
    def runs_of(text: str) -> list[tuple[str, ...]]:
        words = text.split()
        return [tuple(words[n : n + RUN]) for n in range(len(words) - RUN + 1)]

    own = runs_of(document)
    sets = [set(runs_of(reference)) for reference in references if runs_of(reference)]
    if not own or not sets:
        return 0
    share = sum(run in set().union(*sets) for run in own) / len(own)
    return max(share, *(len(one & set(own)) / len(one) for one in sets))


@given(texts, texts)
def test_the_overlap_is_the_larger_of_both_shares(
    documents: list[str], references: list[str]
) -> None:
    found = overlap(documents, word_runs(references, RUN))

    assert found == pytest.approx([defined(document, references) for document in documents])


@given(texts, st.integers(0, 6))
def test_runs_of_groups_of_texts_are_those_of_all(references: list[str], cut: int) -> None:
    whole = word_runs(references, RUN)
    joined = join_runs([word_runs(references[:cut], RUN), word_runs(references[cut:], RUN)])

    assert np.array_equal(np.sort(joined.hashes), np.sort(whole.hashes))
    assert overlap(references, joined) == overlap(references, whole)


def test_a_long_document_that_holds_a_short_reference_overlaps_fully() -> None:
    short = "one two three four five six"
    long = " ".join(f"w{n}" for n in range(500)) + f" {short} " + "end " * 100

    assert overlap([long], word_runs([short], RUN)) == [1]


def test_a_set_phrase_of_many_references_stands_for_none_of_them() -> None:
    phrase = "all rights are reserved here"
    references = [f"{phrase} " + " ".join(f"{n}x{m}" for m in range(3)) for n in range(101)]
    long = " ".join(f"w{n}" for n in range(100)) + " " + phrase

    assert overlap([long], word_runs(references[:100], RUN))[0] == pytest.approx(3 / 6)
    assert overlap([long], word_runs(references, RUN))[0] == pytest.approx(3 / 103)


def test_runs_are_kept_as_they_are(tmp_path: Path) -> None:
    runs = word_runs(["a b c d", "b c d e"], RUN)
    save_runs(str(tmp_path / "folder/runs.npz"), runs)
    kept = load_runs(str(tmp_path / "folder/runs.npz"))

    for name in ("hashes", "texts", "sizes"):
        assert np.array_equal(getattr(kept, name), getattr(runs, name))
