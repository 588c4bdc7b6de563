"""Puts tokenised documents into rows of one length, losing no token."""

from dataclasses import dataclass

import numpy as np

from artifacts.shards import SEGMENT, PackedRows


@dataclass(frozen=True)
class DocumentTokens:
    """Documents one after another, start and end tokens included."""

    tokens: np.ndarray
    """All token ids."""
    starts: np.ndarray
    """Where each document begins; documents are not empty."""


def concatenate(documents: DocumentTokens, sequence_length: int, padding_id: int) -> PackedRows:
    """Fill rows with one document after another; what does not fit goes on in the next row.

    Only the last row is padded.
    """
    total = len(documents.tokens)
    rows = -(-total // sequence_length)
    tokens = np.full(rows * sequence_length, padding_id, documents.tokens.dtype)
    tokens[:total] = documents.tokens
    cuts = np.union1d(documents.starts, np.arange(0, total, sequence_length))
    number = np.searchsorted(documents.starts, cuts, side="right") - 1
    segments = np.empty(len(cuts), SEGMENT)
    segments["start"] = cuts % sequence_length
    segments["length"] = np.diff(cuts, append=total)
    segments["document"] = number
    segments["offset"] = cuts - documents.starts[number]
    row_offsets = np.searchsorted(cuts, np.arange(rows + 1) * sequence_length)
    return PackedRows(tokens.reshape(rows, sequence_length), segments, row_offsets)


def count_cut_documents(rows: PackedRows) -> int:
    """How many documents lie in more than one segment."""
    return len(np.unique(rows.segments["document"][rows.segments["offset"] > 0]))
