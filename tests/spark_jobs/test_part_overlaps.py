"""What is kept of comparisons with held-out texts decides how long a run takes, nothing else."""

import tempfile
from pathlib import Path

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_jobs.decontaminate.ngrams import (
    NGrams,
    group_ngrams,
    load_ngrams,
    ngrams_of,
    save_ngrams,
)
from spark_jobs.decontaminate.overlap import PartOverlaps
from spark_jobs.text import sum_words

SIZE = 2
TEXTS = [" ".join(text) for text in ("abcde", "bcdea", "cde", "eeeab", "a", "abab", "deabc")]
some = st.lists(st.sampled_from(TEXTS), min_size=1, unique=True)
repeated = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=8)


def find_overlaps(
    folder: Path | None, documents: list[str], references: NGrams, may_read: bool = True
) -> list[float]:
    def texts() -> pa.ChunkedArray:
        assert may_read
        return ids

    ids = pa.chunked_array([documents])
    compared = PartOverlaps.of(SIZE, str(folder) if folder else None)
    compared.remember(str(references.url))
    return compared.of_documents("part", ids, texts, references).tolist()


def written(references: list[str], folder: Path) -> NGrams:
    # Clusters by the first letter, so that some n-grams are set phrases, in some runs.
    ngrams = group_ngrams(ngrams_of(sum_words(references), SIZE), [text[0] for text in references])
    return load_ngrams(save_ngrams(str(folder), ngrams.without_phrases()))


@settings(max_examples=60)
@given(runs=st.lists(st.tuples(some, repeated, st.sets(st.integers(0, 5))), min_size=2, max_size=5))
def test_documents_are_compared_as_from_nothing_however_both_texts_change(
    runs: list[tuple[list[str], list[str], set[int]]],
) -> None:
    with tempfile.TemporaryDirectory() as home:
        cache = Path(home, "cache")
        for documents, held_out, lost in runs:
            references = written(held_out, Path(home))
            found = find_overlaps(cache, documents, references)

            assert found == find_overlaps(None, documents, references)
            for number, entry in enumerate(sorted(cache.iterdir())):
                if number in lost:
                    entry.unlink()


def test_texts_that_were_compared_are_not_read_again(tmp_path: Path) -> None:
    fewer, more = written(TEXTS[:2], tmp_path), written(TEXTS[:4], tmp_path)
    first = find_overlaps(tmp_path / "cache", TEXTS, fewer)

    assert find_overlaps(tmp_path / "cache", TEXTS, fewer, may_read=False) == first
    assert find_overlaps(tmp_path / "cache", TEXTS[1:], fewer, may_read=False) == first[1:]
    assert find_overlaps(tmp_path / "cache", TEXTS, more, may_read=False) != first
    assert find_overlaps(tmp_path / "cache", TEXTS, fewer, may_read=False) == first
