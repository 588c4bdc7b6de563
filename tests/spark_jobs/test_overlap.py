"""What a text has in common with texts that must not be trained on, by the definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.decontaminate.ngrams import (
    NGrams,
    group_ngrams,
    ngrams_of,
    overlaps,
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


def test_a_set_phrase_of_many_references_stands_for_none_of_them() -> None:
    phrase = "all rights are reserved here"
    references = [f"{phrase} " + " ".join(f"{n}x{m}" for m in range(3)) for n in range(101)]
    long = " ".join(f"w{n}" for n in range(100)) + " " + phrase

    assert overlap([long], text_ngrams(references[:100], SIZE))[0] == pytest.approx(3 / 6)
    assert overlap([long], text_ngrams(references, SIZE))[0] == 0


def test_boilerplate_of_three_held_out_clusters_says_nothing_of_any_text() -> None:
    clause = "both parties agree to what follows"
    own = "a clause that one contract has, and it alone"
    texts = ngrams_of(sum_words([f"{clause} {own}", *(f"{clause} x{n}" for n in range(3))]), SIZE)

    # Those of evaluation files are in no cluster: an exam quotes what it asks about.
    for clusters, shares in {("a", "a", "b", "b"): [1, 1], ("a", "b", "c", "d"): [0, 1]}.items():
        references = group_ngrams(texts, clusters).without_phrases()
        assert overlap([clause, f"{clause} {own}"], references) == shares
    for apart in ("", "a"):
        references = group_ngrams(texts, ["a", "b", apart, apart]).without_phrases()
        assert overlap([clause], references) == [1]


def test_an_ngram_or_two_beside_boilerplate_say_nothing_of_either_text() -> None:
    clause = " ".join(f"clause{n}" for n in range(30))
    few, many = (" ".join(f"own{n}" for n in range(words)) for words in (3, 30))
    texts = [f"{clause} {few}", f"{clause} x", f"{clause} y", many]
    references = group_ngrams(ngrams_of(sum_words(texts), SIZE), [*"abcd"]).without_phrases()

    found = overlap([f"{clause} and {few}", f"{many} {few}", few, many], references)

    # A text of few n-grams is compared by all that it has.
    assert found == [pytest.approx(1 / 8), 1, 1, 1]
