"""Which way rows go, by how many there are to send and to receive them."""

from typing import Any

from spark_jobs.tokenize.shuffle.by_files import count_files, shuffle_by_files
from spark_jobs.tokenize.shuffle.by_spark import shuffle_by_spark
from spark_jobs.tokenize.shuffle.sending import Sending


def shuffle(sending: Sending, most_ranges: int) -> list[dict[str, Any]]:
    """Bring all rows to where they are sent.

    Args:
        most_ranges: of files, that the driver lists and hands to those that read them. Both ways
            bring the same rows, so this is no part of what is made of them.

    Returns:
        The records of the numbers that got any rows, in no order.
    """
    if count_files(sending) * sending.receivers <= most_ranges:
        return shuffle_by_files(sending)
    return shuffle_by_spark(sending)
