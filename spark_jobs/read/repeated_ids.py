"""Numbers ids that come again by Spark, over any number of documents.

It gives what `chunk_files.number_repeated_ids` gives in the memory of one process. An id that
comes again becomes `a#2`, and if that is taken `a#2#2`: so only ids that are the same without such
endings have to do with each other. They are a family, and one task goes through it in the
snapshot's order.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from artifacts.numbers import run_starts
from artifacts.progress import Report
from artifacts.storage import files
from spark_jobs.read.chunk_files import UniqueIds, change_ids
from spark_jobs.runtime.parquet import RowLocation
from spark_jobs.runtime.tasks import Work, map_tasks

_ID_SCHEMA = pa.schema([("part", pa.int64()), ("row", pa.int64()), ("id", pa.string())])
_CHANGED_SCHEMA = pa.schema([("row", pa.int64()), ("id", pa.string())])
_ENDINGS = "(#[0-9]+)+$"


def number_repeated_ids(work: Work, parts: list[str], report: Report) -> int:
    """Number ids that come again, in the order of the parts, and write those parts again.

    Returns:
        How many ids were given a number.
    """
    ids = work.over_parts(parts, _read_ids, _ID_SCHEMA)
    families = ids.withColumn("family", F.xxhash64(F.regexp_replace("id", _ENDINGS, "")))
    ordered = families.repartition("family").sortWithinPartitions("family", "part", "row")
    changes = ordered.mapInArrow(_changes, from_arrow_schema(_ID_SCHEMA))
    changed = work.by_part(changes, _CHANGED_SCHEMA, "numbering ids that come again")
    items = [(parts[number], place) for number, place in changed.places.items()]
    map_tasks(work.spark, "writing numbered ids", items, _write, report)
    return changed.count


def _read_ids(number: int, part: str) -> pa.Table:
    with files.open_file(part) as file:
        ids = pq.ParquetFile(file, page_checksum_verification=True).read(["id"])["id"]
    places = [np.full(len(ids), number), np.arange(len(ids))]
    return pa.Table.from_arrays([*map(pa.array, places), ids], schema=_ID_SCHEMA)


def _changes(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Of ids in the order of families and places, those that come again, as they are numbered."""
    family, unique = None, UniqueIds()
    for batch in batches:
        families = batch["family"].to_numpy()
        changed: list[dict[str, Any]] = []
        for place in _not_alone(families):
            if families[place] != family:
                family, unique = families[place], UniqueIds()
            for _, numbered in unique.changes([batch["id"][place].as_py()]):
                row = {name: batch[name][place].as_py() for name in ("part", "row")}
                changed.append(row | {"id": numbered})
        yield pa.RecordBatch.from_pylist(changed, _ID_SCHEMA)


def _not_alone(families: np.ndarray) -> list[int]:
    """Places of the ids whose family has others, as far as a batch tells."""
    starts = run_starts(families)
    alone = starts & np.append(starts[1:], False)
    # The batch before may have ended with the first one's family.
    alone[:1] = False
    return np.flatnonzero(~alone).tolist()


def _write(item: tuple[str, RowLocation]) -> dict[str, Any]:
    part, place = item
    rows = place.read()
    change_ids(part, dict(zip(rows["row"].to_pylist(), rows["id"].to_pylist(), strict=True)))
    return {}
