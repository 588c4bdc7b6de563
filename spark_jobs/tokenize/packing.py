"""Packs documents into rows of one length, losing no token."""

from dataclasses import dataclass

import numpy as np

from artifacts.numbers import sorted_unique
from artifacts.shards import format


@dataclass(frozen=True)
class DocumentTokens:
    """Documents one after another, start and end tokens included."""

    tokens: np.ndarray
    """All token ids."""
    starts: np.ndarray
    """Where each document begins; documents are not empty."""


def concatenate(
    documents: DocumentTokens, sequence_length: int, padding_id: int
) -> format.PackedRows:
    """Fill rows with one document after another; what does not fit goes on in the next row.

    Only the last row is padded.
    """
    total = len(documents.tokens)
    rows = -(-total // sequence_length)
    tokens = np.empty(rows * sequence_length, documents.tokens.dtype)
    tokens[:total], tokens[total:] = documents.tokens, padding_id
    # A segment begins wherever a document or a row begins.
    cuts = sorted_unique(np.concatenate([documents.starts, np.arange(0, total, sequence_length)]))
    number = np.searchsorted(documents.starts, cuts, side="right") - 1
    segments = np.empty(len(cuts), format.SEGMENT)
    segments["start"] = cuts % sequence_length
    segments["length"] = np.diff(cuts, append=total)
    segments["document"] = number
    segments["offset"] = cuts - documents.starts[number]
    row_offsets = np.searchsorted(cuts, np.arange(rows + 1) * sequence_length)
    return format.PackedRows(tokens.reshape(rows, sequence_length), segments, row_offsets)


def best_fit(documents: DocumentTokens, sequence_length: int, padding_id: int) -> format.PackedRows:
    """Keep every document that fits into a row whole; longer ones are cut into whole rows first.

    Each piece, longest first, goes into the fullest row that has room for it: the best-fit
    decreasing of Ding and others, "Fewer Truncations Improve Language Modeling" (2024). What rows
    have left is padding.
    """
    ends = np.append(documents.starts[1:], len(documents.tokens))
    number, offset, length = _pieces(ends - documents.starts, sequence_length)
    row_of, rows = _best_fit_rows(length, sequence_length)
    # Within a row, documents are in their own order, however they got there: the same bytes
    # each time.
    order = np.lexsort((offset, number, row_of))
    number, offset, length, row_of = (part[order] for part in (number, offset, length, row_of))
    row_offsets = np.searchsorted(row_of, np.arange(rows + 1))
    before = np.cumsum(length) - length
    segments = np.empty(len(number), format.SEGMENT)
    segments["start"] = before - before[row_offsets[row_of]]
    segments["length"], segments["document"], segments["offset"] = length, number, offset
    tokens = np.full(rows * sequence_length, padding_id, documents.tokens.dtype)
    within = np.arange(length.sum()) - np.repeat(before, length)
    places = np.repeat(row_of * sequence_length + segments["start"], length) + within
    tokens[places] = documents.tokens[np.repeat(documents.starts[number] + offset, length) + within]
    return format.PackedRows(tokens.reshape(rows, sequence_length), segments, row_offsets)


def _pieces(sizes: np.ndarray, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents cut into row-sized pieces and a rest: `(document, offset, length)` of each."""
    counts = -(-sizes // row)
    number = np.repeat(np.arange(len(sizes)), counts)
    place = np.arange(len(number)) - np.repeat(np.cumsum(counts) - counts, counts)
    offset = place * row
    return number, offset, np.minimum(row, sizes[number] - offset)


def _best_fit_rows(lengths: np.ndarray, row: int) -> tuple[np.ndarray, int]:
    """Which row each piece goes to, and how many rows there are."""
    row_of = np.empty(len(lengths), np.int64)
    open_rows: list[list[int]] = [[] for _ in range(row + 1)]
    # Bit n is set while some open row has exactly n places left, so that the tightest fit is found
    # by looking at bits and not at rows.
    available = 0
    rows = 0
    for piece in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[piece])
        fitting = available >> length
        if fitting:
            # The lowest bit that is set is the tightest fit.
            room = length + (fitting & -fitting).bit_length() - 1
            fullest = open_rows[room].pop()
            if not open_rows[room]:
                available &= ~(1 << room)
        else:
            fullest, room = rows, row
            rows += 1
        row_of[piece] = fullest
        room_left = room - length
        if room_left:
            open_rows[room_left].append(fullest)
            available |= 1 << room_left
    return row_of, rows


def one_per_row(
    documents: DocumentTokens, sequence_length: int, padding_id: int
) -> format.PackedRows:
    """A row for each document, none of which is longer than that."""
    ends = np.append(documents.starts[1:], len(documents.tokens))
    lengths = ends - documents.starts
    count = len(lengths)
    tokens = np.full((count, sequence_length), padding_id, documents.tokens.dtype)
    tokens[np.arange(sequence_length) < lengths[:, None]] = documents.tokens
    segments = np.zeros(count, format.SEGMENT)
    segments["length"], segments["document"] = lengths, np.arange(count)
    return format.PackedRows(tokens, segments, np.arange(count + 1))


PACKINGS = {"concatenate": concatenate, "best_fit": best_fit, "one_per_row": one_per_row}


def count_cut_documents(rows: format.PackedRows) -> int:
    """How many documents lie in more than one segment."""
    return len(sorted_unique(rows.segments["document"][rows.segments["offset"] > 0]))
