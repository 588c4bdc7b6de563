"""What becomes of each different text: its cluster's facts come together, then the rules decide.

The rules are those of `spark_jobs.clean.splits`, applied to rows that hold all they need.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema

from spark_jobs.clean.decide.decider import GUARDED, SPOILT
from spark_jobs.clean.splits import (
    NAMES,
    ClusterFacts,
    TextFacts,
    by_hash,
    decide,
    final_splits,
)
from spark_jobs.runtime.work import Work
from spark_jobs.settings import SplitSettings

_NUMBER, _STRING, _TRUTH = pa.int64(), pa.string(), pa.bool_()
_TEXT = [
    ("text", _NUMBER),
    ("text_hash", _STRING),
    ("part", _NUMBER),
    ("row", _NUMBER),
    ("id", _STRING),
    ("characters", _NUMBER),
    ("past", _TRUTH),
    ("forced", _NUMBER),
    ("slice", _NUMBER),
    ("by_text", _NUMBER),
    ("by_id", _NUMBER),
    ("present", _NUMBER),
    ("cluster", _NUMBER),
]
_FACTS = [f"cluster_{name}" for name in ClusterFacts.__dataclass_fields__]
FACT_SCHEMA = pa.schema([*_TEXT, *((name, _NUMBER) for name in _FACTS)])
FATE_SCHEMA = pa.schema(
    [
        *_TEXT,
        ("cluster_name", _STRING),
        ("cluster_reason", _STRING),
        ("eligible", _TRUTH),
        ("stays", _TRUTH),
        ("split", _STRING),
    ]
)


def decide_survivors(
    work: Work, texts: DataFrame, clusters: DataFrame, split: SplitSettings
) -> DataFrame:
    """What was decided of every text.

    Args:
        texts: of `texts.group_exact`.
        clusters: of `components.connect`.

    Returns:
        The columns of `FATE_SCHEMA`, where `stays` is final, `cluster_reason` is why all of a
        cluster goes (null: it does not) and `split` the one of a text that stays; `survivor`, the
        id of the document that is kept in the text's place.
    """
    clustered = texts.join(clusters, "text", "left").withColumn(
        "cluster", F.coalesce("cluster", "text")
    )
    own = clustered.select(*(name for name, _ in _TEXT)).mapInArrow(
        _state_facts, from_arrow_schema(FACT_SCHEMA)
    )
    largest = own.groupBy("cluster").agg(
        *(F.max(name).alias(name) for name in _FACTS), F.min("text_hash").alias("cluster_name")
    )
    together = own.drop(*_FACTS).join(largest, "cluster")
    fates = together.select(*(n for n, _ in _TEXT), *_FACTS, "cluster_name").mapInArrow(
        partial(_apply_rules, split=split), from_arrow_schema(FATE_SCHEMA)
    )
    fates = work.keep(fates, "deciding splits")
    order = F.struct(
        (~F.col("eligible")).alias("is_refused"),
        (-F.col("characters")).alias("characters"),
        *("id", "text"),
    )
    best = fates.groupBy("cluster").agg(F.min(order).alias("best"))
    is_best = F.col("eligible") & (F.col("best.text") == F.col("text"))
    decided = (
        fates.join(best, "cluster")
        .withColumn("stays", F.col("stays") | is_best)
        .withColumn("survivor", F.when(F.col("stays"), F.col("id")).otherwise(F.col("best.id")))
        .withColumn("is_best", F.col("best.text") == F.col("text"))
        .drop("best")
    )
    return work.keep(decided, "choosing survivors")


def _facts_of(batch: pa.RecordBatch) -> TextFacts:
    return TextFacts(
        present=~batch["past"].to_numpy(zero_copy_only=False),
        forced=batch["forced"].to_numpy(),
        by_text=batch["by_text"].to_numpy(),
        by_id=batch["by_id"].to_numpy(),
        slices=batch["slice"].to_numpy(),
    )


def _state_facts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Texts to rows of `FACT_SCHEMA`, with what each says of its cluster."""
    for batch in batches:
        facts = vars(_facts_of(batch).for_cluster()).values()
        columns = [*batch.columns, *map(pa.array, facts)]
        yield pa.record_batch(columns, schema=FACT_SCHEMA)


def _apply_rules(
    batches: Iterator[pa.RecordBatch], split: SplitSettings
) -> Iterator[pa.RecordBatch]:
    """Texts with the facts of their clusters to rows of `FATE_SCHEMA`."""
    for batch in batches:
        texts = _facts_of(batch)
        names = list(ClusterFacts.__dataclass_fields__)
        clusters = ClusterFacts(
            **{n: batch[fact].to_numpy() for n, fact in zip(names, _FACTS, strict=True)}
        )
        fates = decide(texts, clusters, by_hash(batch["cluster_name"], split))
        reason = np.where(fates.guarded, 1, np.where(fates.spoilt, 2, 0))
        yield pa.record_batch(
            [
                *(batch[name] for name, _ in _TEXT),
                batch["cluster_name"],
                pa.array([None, GUARDED, SPOILT], _STRING).take(pa.array(reason)),
                pa.array(fates.eligible),
                pa.array(fates.stays),
                pa.array(NAMES, _STRING).take(pa.array(final_splits(fates, texts))),
            ],
            schema=FATE_SCHEMA,
        )
