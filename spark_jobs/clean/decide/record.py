"""Documents as rows of a frame, and the different texts that they have."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from spark_jobs.clean.decide.decider import DOCUMENT_SCHEMA, DocumentPart
from spark_jobs.clean.forgotten import ForgottenTexts
from spark_jobs.clean.history import (
    NONE,
    ON_RECORD,
    VALIDATION,
    History,
    by_source,
    codes_of,
    representative_rank,
)
from spark_jobs.runtime.parquet import Part
from spark_jobs.runtime.tasks import Work
from spark_jobs.settings import SplitSettings

_PLACE = [("part", pa.int64()), ("row", pa.int64())]
PLACED_SCHEMA = pa.schema([*_PLACE, *DOCUMENT_SCHEMA, ("forced", pa.int64()), ("rank", pa.int64())])
"""A document, where it is, the code of the split that its source is assigned to, and its rank
among documents of equal text (`history.representative_rank`)."""
RECORD_SCHEMA = pa.schema(
    [
        *_PLACE,
        ("id", pa.string()),
        ("text_hash", pa.string()),
        ("split", pa.int64()),
        ("slice", pa.int64()),
    ]
)
"""A text of the record, with the code of its split."""


def read_documents(
    work: Work,
    parts: Sequence[tuple[int, DocumentPart]],
    forgotten: ForgottenTexts,
    split: SplitSettings,
) -> DataFrame:
    """Rows of `PLACED_SCHEMA` of some parts, each with its number."""
    read = partial(_read, forgotten=forgotten, split=split)
    return work.keep_parts(parts, read, PLACED_SCHEMA, "reading documents")


def _read(
    _: int, item: tuple[int, DocumentPart], forgotten: ForgottenTexts, split: SplitSettings
) -> pa.Table:
    number, part = item
    documents = part.read(forgotten)
    forced = by_source(documents["source"], split)
    rank = representative_rank(documents["past"].to_numpy(), forced)
    columns = [*_places(number, documents), *documents.columns, pa.array(forced), pa.array(rank)]
    return pa.Table.from_arrays(columns, schema=PLACED_SCHEMA)


def read_record(work: Work, history: History) -> DataFrame:
    """Rows of `RECORD_SCHEMA`."""
    return work.keep_parts(history.parts, _read_record, RECORD_SCHEMA, "reading the record")


def _read_record(number: int, part: Part) -> pa.Table:
    record = part.read(["id", "text_hash", "split", "slice"])
    splits = pa.array(codes_of(record["split"]))
    columns = [*_places(number, record), record["id"], record["text_hash"], splits, record["slice"]]
    return pa.Table.from_arrays(columns, schema=RECORD_SCHEMA)


def _places(number: int, table: pa.Table) -> list[pa.Array]:
    return [pa.array(np.full(table.num_rows, number)), pa.array(np.arange(table.num_rows))]


def group_exact(
    work: Work, documents: DataFrame, record: DataFrame | None, slice_: int
) -> DataFrame:
    """The different texts of documents without a fault.

    Args:
        record: of earlier corpora, if there is one.
        slice_: number of the corpus in its lineage.

    Returns:
        `text` (numbers that rise with the hash), `text_hash`, `part`, `row`, `id`, `characters`,
        `past`, `forced`, `slice`, `shape` (of the document that stands for the text), `by_text`,
        `by_id` (`history.TextFacts`), `members` (documents) and `present` (those still in the
        sources).
    """
    best = F.struct(
        (-F.col("rank")).alias("rank"),
        (-F.col("characters")).alias("characters"),
        *("id", "part", "row", "past", "forced", "slice", "shape"),
    )
    sound = _look_up(documents.where("fault is null"), record, slice_)
    texts = (
        # In ranges, equal texts lie together, and so all of it is one shuffle and one sort.
        sound.repartitionByRange(work.partitions, "text_hash")
        .groupBy("text_hash")
        .agg(
            F.min(best).alias("best"),
            F.max("by_text").alias("by_text"),
            F.max("by_id").alias("by_id"),
            F.count("*").alias("members"),
            F.sum((~F.col("past")).cast("long")).alias("present"),
        )
        .select(
            "text_hash",
            *(f"best.{name}" for name in ("id", "part", "row", "past", "forced", "slice", "shape")),
            (-F.col("best.characters")).alias("characters"),
            "by_text",
            F.when(F.col("by_text") == NONE, F.col("by_id")).otherwise(NONE).alias("by_id"),
            "members",
            "present",
        )
    )
    numbered = texts.sortWithinPartitions("text_hash").select(
        F.monotonically_increasing_id().alias("text"), "*"
    )
    return work.keep(numbered, "grouping exact copies")


def thin_out(work: Work, texts: DataFrame, keep: int | None) -> DataFrame:
    """The texts that `in_memory.deduplicate.thin_out` leaves."""
    order = Window.partitionBy("shape").orderBy(F.col("by_text") == NONE, "text_hash")
    ranked = texts.where("shape is not null and not past").select(
        "text", "by_text", F.row_number().over(order).alias("rank")
    )
    is_too_much = (F.col("by_text") == NONE) & (F.col("rank") > F.lit(keep))
    too_many = work.keep(ranked.where(is_too_much).select("text"), "thinning templates out")
    if too_many.isEmpty():
        return texts
    return work.keep(texts.join(too_many, "text", "left_anti"), "thinning templates out")


def _look_up(documents: DataFrame, record: DataFrame | None, slice_: int) -> DataFrame:
    """Documents with what the record says of each: `by_text`, `by_id` and `slice`.

    Where the record has a text or an id several times, the first place counts.
    """
    if record is None:
        unknown = F.lit(NONE).cast("long")
        return documents.select(
            *("*", unknown.alias("by_text"), unknown.alias("by_id")),
            F.lit(slice_).cast("long").alias("slice"),
        )
    first = F.min(F.struct("part", "row", "split", "slice", "id"))
    texts = record.groupBy("text_hash").agg(first.alias("known"))
    ids = record.groupBy("id").agg(first.alias("known_id"))
    past = F.col("past")

    def known(recorded: str, field: str, otherwise: int) -> F.Column:
        found = F.coalesce(F.col(f"known.{field}"), F.lit(otherwise))
        # Under other cleaning settings a text may have another hash than it was recorded with.
        return F.when(past, F.col(recorded).cast("long")).otherwise(found)

    is_same, judges = F.col("known.id") == F.col("id"), F.col("known.split") >= VALIDATION
    added = F.when(~is_same | past, 0).when(judges, ON_RECORD).when(is_same, 1).otherwise(0)
    of_id = F.coalesce(F.col("known_id.split"), F.lit(NONE))
    return (
        documents.join(texts, "text_hash", "left")
        .withColumn("by_text", known("recorded_split", "split", NONE))
        .withColumn("slice", known("recorded_slice", "slice", slice_))
        .withColumn("rank", F.col("rank") + added)
        .join(ids, "id", "left")
        .withColumn("by_id", F.when(F.col("by_text") == NONE, of_id).otherwise(NONE))
    )
