"""Who sends what to whom, whichever way it goes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

from artifacts.progress import Report
from spark_jobs.runtime.parquet import Part


class Sent(NamedTuple):
    """Rows of one schema, and the number that each is sent to."""

    to: np.ndarray
    rows: pa.Table


@dataclass(frozen=True)
class Sending:
    """What all parts send, and what becomes of it."""

    spark: SparkSession
    parts: Sequence[Part]
    send: Callable[[tuple[int, Part]], list[Sent]]
    """What a part, given with its number, has for whom; rows that are sent to one number have one
    schema."""
    schema: pa.Schema
    """All columns that any of these rows have."""
    receive: Callable[[tuple[int, pa.Table]], dict[str, Any]]
    """Makes of all rows that were sent to a number, in any order, a record of what became of them.
    They may come with the schema's other columns, empty."""
    receivers: int
    """How many numbers there are at most."""
    scratch: str
    report: Report
