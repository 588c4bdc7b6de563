"""No token is lost in packing, and every document can be put together again."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from spark_jobs.packing import DocumentTokens, concatenate, count_cut_documents

lengths = st.lists(st.integers(1, 70), min_size=1, max_size=40)


def documents_of(counts: list[int]) -> DocumentTokens:
    tokens = np.arange(1, sum(counts) + 1, dtype=np.uint16)
    return DocumentTokens(tokens, np.cumsum(counts) - np.array(counts))


@given(lengths, st.integers(2, 32))
def test_segments_put_every_document_together_again(counts: list[int], row_length: int) -> None:
    documents = documents_of(counts)

    rows = concatenate(documents, row_length, padding_id=0)

    parts: dict[int, list[int]] = {number: [] for number in range(len(counts))}
    for row in range(len(rows.tokens)):
        for segment in rows.segments[rows.row_offsets[row] : rows.row_offsets[row + 1]]:
            number = int(segment["document"])
            assert segment["offset"] == len(parts[number])
            first = segment["start"]
            parts[number] += rows.tokens[row, first : first + segment["length"]].tolist()
    assert np.concatenate([parts[n] for n in range(len(counts))]).tolist() == list(
        range(1, sum(counts) + 1)
    )
    assert count_cut_documents(rows) == sum(
        start // row_length != (start + count - 1) // row_length
        for start, count in zip(documents.starts, counts, strict=True)
    )


@given(lengths, st.integers(2, 32))
def test_only_the_last_row_is_padded(counts: list[int], row_length: int) -> None:
    rows = concatenate(documents_of(counts), row_length, padding_id=0)

    assert len(rows.tokens) == -(-sum(counts) // row_length)
    assert np.count_nonzero(rows.tokens == 0) == len(rows.tokens) * row_length - sum(counts)
