"""Near-copies by Spark's joins: candidate pairs, their true similarity, connected components.

The rows of a band come sorted by their keys, so that each bucket is a run of rows. No task holds a
bucket: Spark's windows spill, and of those that are paired batch by batch the texts just before are
enough. So one of a million documents costs no more memory than one of two.

Of a pair, signatures are compared first, since they are small, and rule most pairs out. Shingle
sets are made of those texts alone that are left, by tasks that read the texts where they are.

Components come by large-star and small-star in turn, from Kiveris, Lattanzi, Mirrokni, Rastogi and
Vassilvitskii, "Connected Components in MapReduce and Beyond" (2014): each text's neighbors and
itself are linked to the smallest of them, for its larger neighbors and for its smaller ones. Both
keep what is connected connected, and a few rounds leave a star around the smallest text of each
component.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from artifacts.numbers import run_starts
from spark_jobs.clean.decide.decider import DocumentPart, plausible, shingle_sets
from spark_jobs.clean.prepare import BUCKET_WINDOW, matrix_of
from spark_jobs.runtime.parquet import RowLocation
from spark_jobs.runtime.tasks import Work
from spark_jobs.settings import NearDuplicateSettings


def connect(work: Work, edges: DataFrame) -> DataFrame:
    """The component of every text with an edge, but for the smallest of each.

    Args:
        edges: `low` and `high`, in any order, where `low` is below `high`.

    Returns:
        `text` and `cluster`, which is the smallest text of its component.
    """
    stars = edges.selectExpr("high as text", "low as cluster").distinct()
    stars = work.keep(stars, "connecting copies")
    while _is_unfinished(work, stars):
        stars = work.keep(_small_star(_large_star(stars)), "connecting copies")
    return stars


def _is_unfinished(work: Work, stars: DataFrame) -> bool:
    """Whether a text still has several centers, or is the center of others itself."""
    several = stars.groupBy("text").count().where("count > 1").select("text")
    centers = stars.selectExpr("cluster as text").distinct()
    chained = stars.join(centers, "text", "left_semi").select("text")
    return bool(work.collect(several.union(chained).limit(1), "connecting copies"))


def _large_star(links: DataFrame) -> DataFrame:
    """Each text's larger neighbors, linked to the smallest neighbor or the text itself."""
    both = links.selectExpr("text as node", "cluster as neighbor").union(
        links.selectExpr("cluster as node", "text as neighbor")
    )
    smallest = both.groupBy("node").agg(F.min(F.least("node", "neighbor")).alias("cluster"))
    larger = both.where("neighbor > node").join(smallest, "node")
    return larger.selectExpr("neighbor as text", "cluster").distinct()


def _small_star(links: DataFrame) -> DataFrame:
    """Each text and its smaller neighbors, linked to the smallest of them."""
    smallest = links.groupBy("text").agg(F.min("cluster").alias("smallest"))
    smaller = links.join(smallest, "text").where("cluster != smallest")
    return (
        smaller.selectExpr("cluster as text", "smallest as cluster")
        .union(smallest.selectExpr("text", "smallest as cluster"))
        .distinct()
    )


BAND_SCHEMA = pa.schema([("key", pa.int64()), ("band", pa.int64()), ("text", pa.int64())])
PAIR_SCHEMA = pa.schema([("low", pa.int64()), ("high", pa.int64())])


def shared_buckets(work: Work, texts: DataFrame, parts: list[DocumentPart]) -> DataFrame:
    """Rows of `BAND_SCHEMA` whose bucket several texts share, with `first`, the first of them."""
    rows = pa.schema([("row", pa.int64()), ("text", pa.int64())])
    places = work.by_part(texts, rows, "finding signatures").places
    items = [(parts[number], place) for number, place in sorted(places.items())]
    bands = work.over_parts(items, _read_bands, BAND_SCHEMA)
    bucket = Window.partitionBy("key", "band")
    buckets = bands.select(
        *("*", F.min("text").over(bucket).alias("first"), F.count("*").over(bucket).alias("size"))
    )
    return work.keep(buckets.where("size > 1").drop("size"), "finding shared bands")


def star_pairs(work: Work, buckets: DataFrame) -> DataFrame:
    """Every text of a bucket with the bucket's first, each pair once."""
    pairs = buckets.where("first != text").selectExpr("first as low", "text as high")
    return work.keep(pairs.distinct(), "pairing candidates")


def window_pairs(
    work: Work, buckets: DataFrame, clusters: DataFrame, stars: DataFrame
) -> DataFrame:
    """Every text of a bucket with those after it, where not yet in one cluster, each pair once.

    Args:
        clusters: of `connect`.
        stars: pairs that were compared already.
    """
    placed = buckets.join(clusters, "text", "left").withColumn(
        "cluster", F.coalesce("cluster", "text")
    )
    # Most buckets are one cluster by now; only the others can change one.
    bucket = ["key", "band"]
    spread = placed.groupBy(*bucket).agg(F.min("cluster").alias("a"), F.max("cluster").alias("b"))
    apart = placed.join(spread.where("a < b").select(*bucket), bucket, "left_semi")
    # The key decides the partition, so a bucket lies in one; the band comes in by the sort.
    ordered = apart.select(*bucket, "text", "cluster").repartition(work.partitions, "key")
    pairs = ordered.sortWithinPartitions(*BAND_SCHEMA.names).mapInArrow(
        find_window, from_arrow_schema(PAIR_SCHEMA)
    )
    rest = pairs.distinct().join(stars, PAIR_SCHEMA.names, "left_anti")
    return work.keep(rest, "pairing the other candidates")


def _read_bands(_: int, item: tuple[DocumentPart, RowLocation]) -> pa.Table:
    part, place = item
    chosen = place.read()
    keys = matrix_of(part.read_rows("bands", chosen["row"]), np.int64)
    count, bands = keys.shape
    columns = [keys.ravel(), np.tile(np.arange(bands), count), np.repeat(chosen["text"], bands)]
    return pa.Table.from_arrays(list(map(pa.array, columns)), schema=BAND_SCHEMA)


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
            # Pairs of held rows alone came out with the batch before.
            left = places[apart & (places + distance >= known)]
            yield pa.record_batch([text[left], text[left + distance]], schema=PAIR_SCHEMA)
        # No pair of the next batch reaches farther back.
        held = rows[:, bucket == bucket[-1]][:, -BUCKET_WINDOW:]


EDGE_SCHEMA = PAIR_SCHEMA.append(pa.field("similarity", pa.float64()))
"""A pair whose true similarity reaches the threshold."""

Read = Callable[[DocumentPart, pa.Array], pa.Array]


@dataclass(frozen=True)
class Verifier:
    """Compares pairs of texts."""

    work: Work
    texts: DataFrame
    parts: list[DocumentPart]
    settings: NearDuplicateSettings

    def verify(self, pairs: DataFrame) -> tuple[DataFrame, int]:
        """The pairs (`PAIR_SCHEMA`) that reach the threshold, as rows of `EDGE_SCHEMA`.

        And how many were compared, since the signatures had not ruled them out.
        """
        threshold = self.settings.threshold
        signed = self._with_values(pairs, _read_signatures, pa.binary())
        likely = signed.mapInArrow(
            partial(_rule_out, threshold=threshold), from_arrow_schema(PAIR_SCHEMA)
        )
        likely = self.work.keep(likely, "comparing signatures")
        read = partial(_read_shingles, words=self.settings.shingle_words)
        shingled = self._with_values(likely, read, pa.list_(pa.int64()))
        common = F.size(F.array_intersect("left", "right"))
        jaccard = common / (F.size("left") + F.size("right") - common)
        compared = shingled.select("low", "high", jaccard.alias("similarity"))
        # Kept below the threshold, too: they are counted, and a lost executor costs no text twice.
        compared = self.work.keep(compared, "comparing texts")
        return compared.where(F.col("similarity") >= threshold), compared.count()

    def _with_values(self, pairs: DataFrame, read: Read, kind: pa.DataType) -> DataFrame:
        """Pairs, each with what is read of both texts: `low`, `high`, `left`, `right`."""
        texts = pairs.selectExpr("low as text").union(pairs.selectExpr("high as text")).distinct()
        rows = pa.schema([("row", pa.int64()), ("text", pa.int64())])
        placed = texts.join(self.texts.select("text", "part", "row"), "text")
        places = self.work.by_part(placed, rows, "finding texts").places
        items = [(self.parts[number], place) for number, place in sorted(places.items())]
        schema = pa.schema([("text", pa.int64()), ("value", kind)])
        work = partial(_read_values, read=read, schema=schema)
        values = self.work.keep_parts(items, work, schema, "reading candidates")
        # A text of very many pairs is the low one: its partition is split, its value sent to all.
        return pairs.join(values.selectExpr("text as low", "value as left"), "low").join(
            values.selectExpr("text as high", "value as right"), "high"
        )


def _read_values(
    _: int, item: tuple[DocumentPart, RowLocation], read: Read, schema: pa.Schema
) -> pa.Table:
    part, place = item
    chosen = place.read()
    return pa.Table.from_arrays([chosen["text"], read(part, chosen["row"])], schema=schema)


def _read_signatures(part: DocumentPart, rows: pa.Array) -> pa.Array:
    return part.read_rows("signature", rows).cast(pa.binary())


def _read_shingles(part: DocumentPart, rows: pa.Array, words: int) -> pa.Array:
    sets = shingle_sets(part.read_rows("text", rows).to_pylist(), words)
    return pa.array([one.view(np.int64) for one in sets], pa.list_(pa.int64()))


def _rule_out(batches: Iterator[pa.RecordBatch], threshold: float) -> Iterator[pa.RecordBatch]:
    for batch in filter(len, batches):
        width = len(batch["left"][0].as_py())
        left, right = (
            matrix_of(batch[name].cast(pa.binary(width)), np.uint8) for name in ("left", "right")
        )
        yield batch.select(PAIR_SCHEMA.names).filter(pa.array(plausible(left, right, threshold)))
