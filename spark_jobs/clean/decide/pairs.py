"""Near-copies by Spark's joins: candidate pairs, their true similarity, connected components.

The rows of a band come sorted by their keys, so that each bucket is a run of rows. No task holds a
bucket: Spark's windows spill, and of those that are paired batch by batch the texts just before are
enough. So one of a million documents costs no more memory than one of two.

The signatures of a pair are compared first, since they are small and rule most pairs out. Shingle
sets are computed only of the remaining texts, by tasks that read the texts where they are.

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
from spark_jobs.clean.decide.near_copies import (
    COMMON_GROUPS,
    FEWEST_COMMON,
    PROBED,
    VERSION_SHARE,
    plausible,
    shingle_sets,
)
from spark_jobs.clean.prepare import BUCKET_WINDOW, NO_SAMPLE, PreparedPart, matrix_of
from spark_jobs.runtime.parquet import RowLocation
from spark_jobs.runtime.tasks import Work
from spark_jobs.settings import NearDuplicateSettings


def connect(work: Work, edges: DataFrame) -> DataFrame:
    """Find the component of every text with an edge, except the smallest text of each.

    Args:
        edges: `low` and `high` of each, where `low` < `high`; rows in any order.

    Returns:
        `text` and `cluster`, which is the smallest text of its component.
    """
    # Every text is linked to a smaller one from the first round on.
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
    # One row is enough to go on, so that Spark need not find all.
    return bool(work.collect(several.union(chained).limit(1), "connecting copies"))


def _large_star(links: DataFrame) -> DataFrame:
    """Link each text's larger neighbors to the smallest of its neighbors and itself."""
    directed = links.selectExpr("text as node", "cluster as neighbor").union(
        links.selectExpr("cluster as node", "text as neighbor")
    )
    smallest = directed.groupBy("node").agg(F.min(F.least("node", "neighbor")).alias("cluster"))
    larger = directed.where("neighbor > node").join(smallest, "node")
    return larger.selectExpr("neighbor as text", "cluster").distinct()


def _small_star(links: DataFrame) -> DataFrame:
    """Link each text and its smaller neighbors to the smallest of them."""
    smallest = links.groupBy("text").agg(F.min("cluster").alias("smallest"))
    smaller = links.join(smallest, "text").where("cluster != smallest")
    return (
        smaller.selectExpr("cluster as text", "smallest as cluster")
        .union(smallest.selectExpr("text", "smallest as cluster"))
        .distinct()
    )


BAND_SCHEMA = pa.schema([("key", pa.int64()), ("band", pa.int64()), ("text", pa.int64())])
PAIR_SCHEMA = pa.schema([("low", pa.int64()), ("high", pa.int64())])


def shared_buckets(work: Work, texts: DataFrame, parts: list[PreparedPart]) -> DataFrame:
    """Rows of `BAND_SCHEMA` in buckets that several texts share; `first` is the first of these."""
    rows = pa.schema([("row", pa.int64()), ("text", pa.int64())])
    places = work.by_part(texts, rows, "finding signatures").places
    items = [(parts[number], place) for number, place in sorted(places.items())]
    bands = work.over_parts(items, _read_bands, BAND_SCHEMA)
    # The key and the band: equal keys of different bands do not mean equal rows.
    bucket = Window.partitionBy("key", "band")
    buckets = bands.select(
        *("*", F.min("text").over(bucket).alias("first"), F.count("*").over(bucket).alias("size"))
    )
    return work.keep(buckets.where("size > 1").drop("size"), "finding shared bands")


def star_pairs(work: Work, buckets: DataFrame) -> DataFrame:
    """Pair every text of a bucket with the bucket's first; each pair once."""
    pairs = buckets.where("first != text").selectExpr("first as low", "text as high")
    return work.keep(pairs.distinct(), "pairing candidates")


def window_pairs(
    work: Work, buckets: DataFrame, clusters: DataFrame, stars: DataFrame
) -> DataFrame:
    """Pair every text of a bucket with those after it, unless in one cluster; each pair once.

    Args:
        clusters: of `connect`, from the pairs that were compared first.
        stars: these pairs.
    """
    # `connect` leaves out the smallest text of a cluster and texts without edges: they are their
    # own cluster.
    placed = buckets.join(clusters, "text", "left").withColumn(
        "cluster", F.coalesce("cluster", "text")
    )
    # Most buckets are one cluster by now; only the others can change one.
    bucket = ["key", "band"]
    spread = placed.groupBy(*bucket).agg(F.min("cluster").alias("a"), F.max("cluster").alias("b"))
    apart = placed.join(spread.where("a < b").select(*bucket), bucket, "left_semi")
    # The key decides the partition, so a bucket lies in one; sorting also tells bands apart.
    ordered = apart.select(*bucket, "text", "cluster").repartition(work.partitions, "key")
    pairs = ordered.sortWithinPartitions(*BAND_SCHEMA.names).mapInArrow(
        find_window, from_arrow_schema(PAIR_SCHEMA)
    )
    rest = pairs.distinct().join(stars, PAIR_SCHEMA.names, "left_anti")
    return work.keep(rest, "pairing the other candidates")


def _read_bands(_: int, item: tuple[PreparedPart, RowLocation]) -> pa.Table:
    part, place = item
    rows = place.read()
    # Spark has no unsigned numbers. Keys are only compared, so their sign does not matter.
    keys = matrix_of(part.read_rows("bands", rows["row"]), np.int64)
    count, bands = keys.shape
    columns = [keys.ravel(), np.tile(np.arange(bands), count), np.repeat(rows["text"], bands)]
    return pa.Table.from_arrays(list(map(pa.array, columns)), schema=BAND_SCHEMA)


def find_window(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Find the pairs of a window (`PAIR_SCHEMA`) in sorted rows of `BAND_SCHEMA` and clusters."""
    # The end of the last bucket, which may go on in the next batch.
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
            # Pairs of two held rows were already returned with the batch before.
            left = places[apart & (places + distance >= known)]
            yield pa.record_batch([text[left], text[left + distance]], schema=PAIR_SCHEMA)
        # No pair of the next batch reaches back farther, nor into another bucket.
        held = rows[:, bucket == bucket[-1]][:, -BUCKET_WINDOW:]


SAMPLE_SCHEMA = pa.schema([("shingle", pa.int64()), ("text", pa.int64())])


def find_versions(work: Work, texts: DataFrame, parts: list[PreparedPart]) -> DataFrame:
    """Rows of `PAIR_SCHEMA`: what `near_copies.find_versions` links."""
    rows = pa.schema([("row", pa.int64()), ("text", pa.int64())])
    places = work.by_part(texts, rows, "finding samples").places
    items = [(parts[number], place) for number, place in sorted(places.items())]
    samples = work.over_parts(items, _read_samples, SAMPLE_SCHEMA)
    shared = F.count("*").over(Window.partitionBy("shingle")).alias("texts")
    probed = samples.where(F.col("shingle") < PROBED).select("*", shared).where("texts > 1")
    searched = work.keep(probed.select("text").distinct(), "looking for versions")
    samples = samples.join(searched, "text", "left_semi")
    few = samples.select("*", shared).where(F.col("texts") <= COMMON_GROUPS)
    few = work.keep(few, "leaving boilerplate out")
    sizes = few.groupBy("text").count()
    low, high = (
        few.where("texts > 1").select("shingle", F.col("text").alias(n)) for n in ("low", "high")
    )
    common = (
        low.join(high, "shingle")
        .where("low < high")
        .groupBy("low", "high")
        .agg(F.count("*").alias("common"))
    )
    for name in ("low", "high"):
        common = common.join(sizes.selectExpr(f"text as {name}", f"count as of_{name}"), name)
    share = F.least("of_low", "of_high") * VERSION_SHARE
    enough = F.col("common") >= F.greatest(F.lit(float(FEWEST_COMMON)), share)
    return work.keep(common.where(enough).select(*PAIR_SCHEMA.names), "linking versions")


def _read_samples(_: int, item: tuple[PreparedPart, RowLocation]) -> pa.Table:
    part, place = item
    rows = place.read()
    samples = matrix_of(part.read_rows("sample", rows["row"]), np.uint32)
    number, column = np.nonzero(samples != NO_SAMPLE)
    columns = [samples[number, column].astype(np.int64), rows["text"].to_numpy()[number]]
    return pa.Table.from_arrays(list(map(pa.array, columns)), schema=SAMPLE_SCHEMA)


EDGE_SCHEMA = PAIR_SCHEMA.append(pa.field("similarity", pa.float64()))
"""A pair whose true similarity reaches the threshold."""

Read = Callable[[PreparedPart, pa.Array], pa.Array]


@dataclass(frozen=True)
class Verifier:
    """Compares pairs of texts."""

    work: Work
    texts: DataFrame
    parts: list[PreparedPart]
    settings: NearDuplicateSettings

    def verify(self, pairs: DataFrame) -> tuple[DataFrame, int]:
        """Compare pairs (`PAIR_SCHEMA`); return those that reach the threshold, as `EDGE_SCHEMA`.

        Also returns how many were compared, which the signatures had not ruled out.
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
        # All are kept: those below are counted, too, and a lost executor costs no text twice.
        compared = self.work.keep(compared, "comparing texts")
        return compared.where(F.col("similarity") >= threshold), compared.count()

    def _with_values(self, pairs: DataFrame, read: Read, kind: pa.DataType) -> DataFrame:
        """Join pairs with what is read of both texts: `low`, `high`, `left`, `right`."""
        # Each text is read once, however many pairs it is in.
        texts = pairs.selectExpr("low as text").union(pairs.selectExpr("high as text")).distinct()
        rows = pa.schema([("row", pa.int64()), ("text", pa.int64())])
        placed = texts.join(self.texts.select("text", "part", "row"), "text")
        places = self.work.by_part(placed, rows, "finding texts").places
        items = [(self.parts[number], place) for number, place in sorted(places.items())]
        schema = pa.schema([("text", pa.int64()), ("value", kind)])
        work = partial(_read_values, read=read, schema=schema)
        values = self.work.keep_parts(items, work, schema, "reading candidates")
        # A text of very many pairs is the low one: its partition is split, and its value copied.
        return pairs.join(values.selectExpr("text as low", "value as left"), "low").join(
            values.selectExpr("text as high", "value as right"), "high"
        )


def _read_values(
    _: int, item: tuple[PreparedPart, RowLocation], read: Read, schema: pa.Schema
) -> pa.Table:
    part, place = item
    rows = place.read()
    return pa.Table.from_arrays([rows["text"], read(part, rows["row"])], schema=schema)


def _read_signatures(part: PreparedPart, rows: pa.Array) -> pa.Array:
    # Spark has no binary values of a fixed size; `_rule_out` finds the size again.
    return part.read_rows("signature", rows).cast(pa.binary())


def _read_shingles(part: PreparedPart, rows: pa.Array, words: int) -> pa.Array:
    sets = shingle_sets(part.read_rows("text", rows).to_pylist(), words)
    # Signed, as Spark has no other numbers; equal hashes stay equal.
    return pa.array([hashes.view(np.int64) for hashes in sets], pa.list_(pa.int64()))


def _rule_out(batches: Iterator[pa.RecordBatch], threshold: float) -> Iterator[pa.RecordBatch]:
    for batch in filter(len, batches):
        width = len(batch["left"][0].as_py())
        left, right = (
            matrix_of(batch[name].cast(pa.binary(width)), np.uint8) for name in ("left", "right")
        )
        yield batch.select(PAIR_SCHEMA.names).filter(pa.array(plausible(left, right, threshold)))
