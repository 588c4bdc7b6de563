"""Candidate pairs: texts that share a band of their signatures.

The rows of a band come sorted by their keys, so that each bucket is a run of rows. A task goes
through them batch by batch and holds no bucket: of a bucket, its first text and the texts just
before are enough, so that one of a million documents costs no more memory than one of two.
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from artifacts.numbers.arrays import run_starts
from spark_jobs.clean.decide.documents import DocumentPart
from spark_jobs.clean.prepare import matrix_of
from spark_jobs.clean.signatures import BUCKET_WINDOW
from spark_jobs.runtime.part_rows import Place
from spark_jobs.runtime.work import Work

BAND_SCHEMA = pa.schema([("key", pa.int64()), ("band", pa.int64()), ("text", pa.int64())])
BUCKET_SCHEMA = BAND_SCHEMA.append(pa.field("first", pa.int64()))
"""A text of a bucket that several share, and the bucket's first text."""
PAIR_SCHEMA = pa.schema([("low", pa.int64()), ("high", pa.int64())])


def shared_buckets(work: Work, texts: DataFrame, parts: list[DocumentPart]) -> DataFrame:
    """Rows of `BUCKET_SCHEMA`."""
    rows = pa.schema([("row", pa.int64()), ("text", pa.int64())])
    places = work.by_part(texts, rows, "finding signatures").places
    items = [(parts[number], place) for number, place in sorted(places.items())]
    bands = work.over_parts(items, _read_bands, BAND_SCHEMA)
    ordered = bands.repartition(work.partitions, "key").sortWithinPartitions(*BAND_SCHEMA.names)
    buckets = ordered.mapInArrow(find_shared, from_arrow_schema(BUCKET_SCHEMA))
    return work.keep(buckets, "finding shared bands")


def star_pairs(work: Work, buckets: DataFrame) -> DataFrame:
    """Every text of a bucket with the bucket's first, each pair once."""
    pairs = buckets.where("first != text").selectExpr("first as low", "text as high")
    return work.keep(pairs.distinct(), "pairing candidates")


def window_pairs(
    work: Work, buckets: DataFrame, clusters: DataFrame, stars: DataFrame
) -> DataFrame:
    """Every text of a bucket with those after it, where not yet in one cluster, each pair once.

    Args:
        clusters: of `components.connect`.
        stars: pairs that were compared already.
    """
    placed = buckets.join(clusters, "text", "left").withColumn(
        "cluster", F.coalesce("cluster", "text")
    )
    # Most buckets are one cluster by now; only the others can change one.
    bucket = ["key", "band"]
    spread = placed.groupBy(*bucket).agg(F.min("cluster").alias("a"), F.max("cluster").alias("b"))
    apart = placed.join(spread.where("a < b").select(*bucket), bucket, "left_semi")
    ordered = apart.select(*bucket, "text", "cluster").repartition(work.partitions, "key")
    pairs = ordered.sortWithinPartitions(*BAND_SCHEMA.names).mapInArrow(
        find_window, from_arrow_schema(PAIR_SCHEMA)
    )
    rest = pairs.distinct().join(stars, PAIR_SCHEMA.names, "left_anti")
    return work.keep(rest, "pairing the other candidates")


def _read_bands(_: int, item: tuple[DocumentPart, Place]) -> pa.Table:
    part, place = item
    chosen = place.read()
    keys = matrix_of(part.read_rows("bands", chosen["row"]), np.int64)
    count, bands = keys.shape
    columns = [keys.ravel(), np.tile(np.arange(bands), count), np.repeat(chosen["text"], bands)]
    return pa.Table.from_arrays(list(map(pa.array, columns)), schema=BAND_SCHEMA)


def find_shared(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Rows of `BAND_SCHEMA`, sorted, to those of buckets with several texts (`BUCKET_SCHEMA`).

    The last row is held back, since the next batch tells whether its bucket goes on.
    """
    held = np.empty((4, 0), np.int64)
    held_is_shared = False
    for batch in filter(len, batches):
        rows = np.stack([column.to_numpy() for column in batch.columns])
        rows = np.concatenate([held[:3], rows], axis=1)
        starts = run_starts(rows[0]) | run_starts(rows[1])
        firsts = rows[2, starts]
        if held.size:
            firsts[0] = held[3, 0]
        rows = np.concatenate([rows, firsts[np.cumsum(starts) - 1][np.newaxis]])
        is_shared = ~starts
        is_shared[:1] = held_is_shared
        is_shared[:-1] |= ~starts[1:]
        yield _bucket_rows(rows[:, :-1][:, is_shared[:-1]])
        held, held_is_shared = rows[:, -1:], bool(is_shared[-1])
    if held_is_shared:
        yield _bucket_rows(held)


def find_window(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Sorted rows of `BAND_SCHEMA` with their clusters to the pairs of a window (`PAIR_SCHEMA`)."""
    held = np.empty((4, 0), np.int64)
    for batch in filter(len, batches):
        known = held.shape[1]
        rows = np.concatenate([held, np.stack([c.to_numpy() for c in batch.columns])], axis=1)
        bucket = np.cumsum(run_starts(rows[0]) | run_starts(rows[1]))
        text, cluster = rows[2], rows[3]
        places = np.arange(len(text))
        for distance in range(1, BUCKET_WINDOW + 1):
            places = places[places + distance < len(text)]
            places = places[bucket[places] == bucket[places + distance]]
            if not len(places):
                break
            apart = cluster[places] != cluster[places + distance]
            left = places[apart & (places + distance >= known)]
            yield pa.record_batch([text[left], text[left + distance]], schema=PAIR_SCHEMA)
        held = rows[:, bucket == bucket[-1]][:, -BUCKET_WINDOW:]


def _bucket_rows(rows: np.ndarray) -> pa.RecordBatch:
    return pa.record_batch([pa.array(row) for row in rows], schema=BUCKET_SCHEMA)
