"""The true similarity of candidate pairs: what is compared meets in Spark's joins.

Signatures come first, since they are small, and rule most pairs out. Shingle sets are made of those
texts alone that are left, by tasks that read the texts where they are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from spark_jobs.clean.decide.by_spark.candidates import PAIR_SCHEMA
from spark_jobs.clean.decide.documents import DocumentPart
from spark_jobs.clean.decide.similarity import plausible, shingle_sets
from spark_jobs.clean.prepare import matrix_of
from spark_jobs.runtime.part_rows import Place
from spark_jobs.runtime.work import Work
from spark_jobs.settings import NearDuplicateSettings

EDGE_SCHEMA = PAIR_SCHEMA.append(pa.field("similarity", pa.float64()))
"""A pair whose true similarity reaches the threshold."""

Read = Callable[[DocumentPart, pa.Array], pa.Array]


@dataclass(frozen=True)
class Verified:
    """Pairs that were compared."""

    edges: DataFrame
    """Rows of `EDGE_SCHEMA`."""
    compared: int
    """Pairs that the signatures had not ruled out."""


class Verifier:
    """Compares pairs of texts."""

    def __init__(
        self,
        work: Work,
        texts: DataFrame,
        parts: list[DocumentPart],
        settings: NearDuplicateSettings,
    ) -> None:
        self._work = work
        self._places = texts.select("text", "part", "row")
        self._parts = parts
        self._settings = settings

    def verify(self, pairs: DataFrame) -> Verified:
        """Compare pairs (`PAIR_SCHEMA`), and keep those that reach the threshold."""
        threshold = self._settings.threshold
        signed = self._with_values(pairs, _read_signatures, pa.binary())
        likely = signed.mapInArrow(
            partial(_rule_out, threshold=threshold), from_arrow_schema(PAIR_SCHEMA)
        )
        likely = self._work.keep(likely, "comparing signatures")
        read = partial(_read_shingles, words=self._settings.shingle_words)
        shingled = self._with_values(likely, read, pa.list_(pa.int64()))
        common = F.size(F.array_intersect("left", "right"))
        jaccard = common / (F.size("left") + F.size("right") - common)
        compared = shingled.select("low", "high", jaccard.alias("similarity"))
        compared = self._work.keep(compared, "comparing texts")
        return Verified(compared.where(F.col("similarity") >= threshold), compared.count())

    def _with_values(self, pairs: DataFrame, read: Read, kind: pa.DataType) -> DataFrame:
        """Pairs, each with what is read of both texts: `low`, `high`, `left`, `right`."""
        texts = pairs.selectExpr("low as text").union(pairs.selectExpr("high as text")).distinct()
        rows = pa.schema([("row", pa.int64()), ("text", pa.int64())])
        places = self._work.by_part(texts.join(self._places, "text"), rows, "finding texts").places
        items = [(self._parts[number], place) for number, place in sorted(places.items())]
        schema = pa.schema([("text", pa.int64()), ("value", kind)])
        work = partial(_read_values, read=read, schema=schema)
        values = self._work.keep_parts(items, work, schema, "reading candidates")
        # A text of very many pairs is the low one: its partition is split, its value sent to all.
        return pairs.join(values.selectExpr("text as low", "value as left"), "low").join(
            values.selectExpr("text as high", "value as right"), "high"
        )


def _read_values(
    _: int, item: tuple[DocumentPart, Place], read: Read, schema: pa.Schema
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
