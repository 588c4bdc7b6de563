"""What a text has in common with texts that must not be trained on, by the definition."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.decontaminate.overlap import (
    NGrams,
    join_ngrams,
    load_ngrams,
    ngrams_of,
    overlaps,
    save_ngrams,
    text_ngrams,
)
from spark_jobs.text import sum_words

SIZE = 3
texts = st.lists(
    st.lists(st.sampled_from(list("abcde")), min_size=1, max_size=12).map(" ".join),
    min_size=1,
    max_size=6,
)


def overlap(documents: list[str], references: NGrams) -> list[float]:
    return overlaps(ngrams_of(sum_words(documents), SIZE), references).tolist()


def defined(document: str, references: list[str]) -> float:
    def ngrams_in(text: str) -> list[tuple[str, ...]]:
        words = text.split()
        return [tuple(words[n : n + SIZE]) for n in range(len(words) - SIZE + 1)]

    own = ngrams_in(document)
    sets = [set(ngrams_in(reference)) for reference in references if ngrams_in(reference)]
    if not own or not sets:
        return 0
    share = sum(one in set().union(*sets) for one in own) / len(own)
    return max(share, *(len(one & set(own)) / len(one) for one in sets))


@given(texts, texts)
def test_the_overlap_is_the_larger_of_both_shares(
    documents: list[str], references: list[str]
) -> None:
    found = overlap(documents, text_ngrams(references, SIZE))

    assert found == pytest.approx([defined(document, references) for document in documents])


@given(texts, st.integers(0, 6))
def test_ngrams_of_groups_of_texts_are_those_of_all(references: list[str], cut: int) -> None:
    whole = text_ngrams(references, SIZE)
    joined = join_ngrams([text_ngrams(references[:cut], SIZE), text_ngrams(references[cut:], SIZE)])

    assert np.array_equal(np.sort(joined.hashes), np.sort(whole.hashes))
    assert overlap(references, joined) == overlap(references, whole)


def test_a_long_document_that_holds_a_short_reference_overlaps_fully() -> None:
    short = "one two three four five six"
    long = " ".join(f"w{n}" for n in range(500)) + f" {short} " + "end " * 100

    assert overlap([long], text_ngrams([short], SIZE)) == [1]


def test_a_set_phrase_of_many_references_stands_for_none_of_them() -> None:
    phrase = "all rights are reserved here"
    references = [f"{phrase} " + " ".join(f"{n}x{m}" for m in range(3)) for n in range(101)]
    long = " ".join(f"w{n}" for n in range(100)) + " " + phrase

    assert overlap([long], text_ngrams(references[:100], SIZE))[0] == pytest.approx(3 / 6)
    assert overlap([long], text_ngrams(references, SIZE))[0] == pytest.approx(3 / 103)


def test_ngrams_are_read_as_they_were_written(tmp_path: Path) -> None:
    ngrams = text_ngrams(["a b c d", "b c d e"], SIZE)
    found = load_ngrams(save_ngrams(str(tmp_path / "folder"), ngrams))

    for name in ("hashes", "texts", "sizes"):
        assert np.array_equal(getattr(found, name), getattr(ngrams, name))
