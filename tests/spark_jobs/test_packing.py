"""No token is lost in packing, and every document can be put together again."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.shards.format import PackedRows
from spark_jobs.tokenize.packing import DocumentTokens, best_fit, concatenate, count_cut_documents

lengths = st.lists(st.integers(1, 70), min_size=1, max_size=40)


def documents_of(counts: list[int]) -> DocumentTokens:
    tokens = np.arange(1, sum(counts) + 1, dtype=np.uint16)
    return DocumentTokens(tokens, np.cumsum(counts) - np.array(counts))


@pytest.mark.parametrize("pack", [concatenate, best_fit])
@given(counts=lengths, row_length=st.integers(2, 32))
def test_segments_put_every_document_together_again(
    pack: Callable[..., PackedRows], counts: list[int], row_length: int
) -> None:
    documents = documents_of(counts)

    rows = pack(documents, row_length, padding_id=0)

    parts: dict[int, list[tuple[int, list[int]]]] = {number: [] for number in range(len(counts))}
    for row in range(len(rows.tokens)):
        for segment in rows.segments[rows.row_offsets[row] : rows.row_offsets[row + 1]]:
            number = int(segment["document"])
            first = segment["start"]
            part = rows.tokens[row, first : first + segment["length"]].tolist()
            parts[number].append((int(segment["offset"]), part))
    tokens = [token for n in parts for _, part in sorted(parts[n]) for token in part]
    assert tokens == list(range(1, sum(counts) + 1))
    covered = rows.segments["length"].sum()
    assert covered + np.count_nonzero(rows.tokens == 0) == rows.tokens.size
    assert count_cut_documents(rows) == sum(len(segments) > 1 for segments in parts.values())


@given(lengths, st.integers(2, 32))
def test_best_fit_keeps_documents_whole_where_they_fit(counts: list[int], row_length: int) -> None:
    rows = best_fit(documents_of(counts), row_length, padding_id=0)

    assert count_cut_documents(rows) == sum(count > row_length for count in counts)
    # No two rows could be one, so at most about twice the rows needed.
    filled = np.array(
        [
            rows.segments["length"][first:last].sum()
            for first, last in itertools.pairwise(rows.row_offsets)
        ]
    )
    assert np.all(np.sort(filled)[:2].sum() > row_length) or len(filled) == 1


@given(lengths, st.integers(2, 32))
def test_only_the_last_row_is_padded(counts: list[int], row_length: int) -> None:
    rows = concatenate(documents_of(counts), row_length, padding_id=0)

    assert len(rows.tokens) == -(-sum(counts) // row_length)
    assert np.count_nonzero(rows.tokens == 0) == len(rows.tokens) * row_length - sum(counts)
