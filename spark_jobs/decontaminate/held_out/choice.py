"""Which way reference n-grams take, by the size of the held-out text alone."""

from spark_jobs.decontaminate.held_out.joined import join_references
from spark_jobs.decontaminate.held_out.references import Comparison, References
from spark_jobs.decontaminate.held_out.sent import send_references

BYTES_PER_WORD = 6
"""Of text, the blank included; a text has nearly as many n-grams as words."""


def find_references(
    comparison: Comparison, text_bytes: int, held_out_bytes: int, most_bytes: int
) -> References:
    """The n-grams of the reference texts, for so much text in all and so much that is held out.

    Both ways give the same overlaps, so `most_bytes` is no part of what the shards are.
    """
    if held_out_bytes <= most_bytes:
        return send_references(comparison)
    return join_references(comparison, text_bytes // BYTES_PER_WORD)
