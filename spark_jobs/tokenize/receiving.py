"""What becomes of the rows that parts send: shards, lists of what overlaps too much, counts."""

from collections import Counter
from typing import Any

import pyarrow as pa

from spark_jobs.decontaminate.removed import write_list
from spark_jobs.tokenize.shards import Plan, write_shard_of

UNUSED = -1
"""In place of a shard's number: the counts of what is not used."""
FIRST_LIST = -2
"""The first list of documents that overlap too much with reference text; then -3 and on."""

UNUSED_SCHEMA = pa.schema([("left_out", pa.string()), ("documents", pa.int64())])
"""Why documents are not used, and how many."""


def count_receivers(plan: Plan) -> int:
    """How many numbers rows are sent to."""
    return len(plan.shard_names) + plan.lists + 1


def receive(arrived: tuple[int, pa.Table], plan: Plan) -> dict[str, Any]:
    """Do with the rows that were sent to a number what they were sent for.

    Returns:
        `shard`, what is known of it; or `removed`, the split of listed documents to how many; or
        `unused`, the reason to how many.
    """
    number, rows = arrived
    if number == UNUSED:
        counts: Counter[str] = Counter()
        for row in rows.to_pylist():
            counts[row["left_out"]] += row["documents"]
        return {"unused": dict(counts)}
    if number <= FIRST_LIST:
        return {"removed": write_list(FIRST_LIST - number, rows, plan.output)}
    return {"shard": write_shard_of(number, rows, plan)}
