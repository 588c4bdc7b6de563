"""Decides by Spark's joins over small columns; the driver holds nothing of any document.

The rules are those of `spark_jobs.clean.history`, applied to rows that hold all they need: the
facts of a text's cluster come together, then it is decided what becomes of the text.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from spark_jobs.clean import history
from spark_jobs.clean.decide import decider, pairs
from spark_jobs.clean.decide.decider import DUPLICATE_SCHEMA, EXACT, NEAR, DecisionRun
from spark_jobs.clean.forgotten import ForgottenTexts
from spark_jobs.clean.prepare import PreparedPart
from spark_jobs.read.document import are_row_numbers
from spark_jobs.runtime.parquet import Part, PartRows
from spark_jobs.runtime.tasks import Work
from spark_jobs.settings import SplitSettings

ROWS_PER_DOCUMENT = 20
"""Rows of the largest shuffle, that of the bands: about one per band and document."""


@dataclass(frozen=True)
class _Near:
    """Near-copies among distinct texts."""

    edges: DataFrame
    """Rows of `pairs.EDGE_SCHEMA`."""
    clusters: DataFrame
    """Of `pairs.connect`."""
    candidates: int
    verified: int


class SparkDecider(decider.Decider):
    """Decides over any number of documents; the driver holds a few numbers of each part."""

    def __init__(self, run: DecisionRun, parts: list[PreparedPart], documents: int) -> None:
        """`documents` is about how many there are, those of the record included."""
        self._run = run
        self._parts = parts
        self._work = Work(run.spark, documents * ROWS_PER_DOCUMENT, run.scratch, run.report)
        self._record: DataFrame | None = None
        if run.history:
            self._record = self._work.keep_parts(
                run.history.parts, _read_record, RECORD_SCHEMA, "reading the record"
            )

    @cached_property
    def _corpus(self) -> DataFrame:
        # Read once, and kept for all of the questions below.
        return self._read(enumerate(self._parts))

    def repeated_ids(self) -> list[tuple[str, int]]:
        counts = self._corpus.groupBy("id").count().where("count > 1")
        rows = self._work.collect(counts.orderBy("id").limit(3), "counting ids")
        return [(str(row["id"]), int(row["count"])) for row in rows]

    def sources(self) -> set[str]:
        names = self._corpus.select("source").distinct()
        return {str(row["source"]) for row in self._work.collect(names, "listing sources")}

    def texts_left(self) -> PartRows:
        return self._not_among(self._corpus.where("fault is null"))

    def decide(self, past: list[PreparedPart]) -> decider.DecidedDocuments:
        work = self._work
        parts = [*self._parts, *past]
        documents = self._corpus
        # Parts of texts that have left are numbered behind those of the corpus.
        if past:
            documents = documents.union(self._read(enumerate(past, len(self._parts))))
        slice_ = self._slice()
        groups = group_exact(work, documents, self._record, slice_)
        documents, groups = thin_out(work, documents, groups, self._run.settings.templates.keep)
        near = self._find_near(groups, parts)
        versions = self._find_versions(groups, near.clusters, parts)
        split = self._run.settings.split
        texts = decide_survivors(work, groups, near.clusters, versions, split)
        fates = work.keep(_document_fates(documents.where("not past"), texts), "deciding documents")
        counts = fates.groupBy("reason", "source").agg(
            F.count("*").alias("documents"),
            F.sum("bytes").alias("bytes"),
            F.sum(F.col("repaired").cast("long")).alias("repaired"),
        )
        counted = work.collect(counts, "counting documents")
        copies = _exact_copies(fates).union(_near_copies(texts, near.edges))
        stay = texts.where("stays")
        # Documents that have left the sources are not counted.
        sizes = texts.groupBy("cluster").agg(F.sum("present").alias("value")).where("value > 0")
        slices = stay.groupBy("slice", "split").agg(F.count("*").alias("documents"))
        exact = work.collect(groups.selectExpr("sum(members - 1) as copies"), "counting copies")
        decided = stay.select(
            "part", "row", F.col("cluster_name").alias("cluster"), "split", "slice"
        )
        return decider.DecidedDocuments(
            stay=work.by_part(decided, decider.DECIDED_SCHEMA, "bringing decisions to parts"),
            left=self._not_among(stay),
            duplicates=work.in_order(copies, "id", DUPLICATE_SCHEMA),
            dropped=work.in_order(
                # Where there is no reason, this is null, which is not true.
                fates.where(~F.col("reason").isin(*decider.LISTED_ELSEWHERE)),
                "id",
                decider.DROPPED_SCHEMA,
            ),
            fates=counted,
            slices=work.collect(slices, "counting splits"),
            lengths=self._histogram(
                # One less than the number of binary digits: the exponent of the power of two.
                stay.select((F.length(F.bin("characters")) - 1).alias("value"))
            ),
            cluster_sizes=self._histogram(sizes),
            slice=slice_,
            # Over no rows, the sum is null.
            exact_copies=exact[0]["copies"] or 0,
            near_copies=near.edges.count(),
            candidates=near.candidates,
            verified=near.verified,
        )

    def _read(self, parts: Iterable[tuple[int, PreparedPart]]) -> DataFrame:
        run = self._run
        read = partial(
            _read_documents,
            forgotten=run.forgotten,
            split=run.settings.split,
            numbered=run.numbered_sources,
        )
        return self._work.keep_parts(list(parts), read, PLACED_SCHEMA, "reading documents")

    def _slice(self) -> int:
        """Number of this corpus in its lineage."""
        if self._record is None:
            return 1
        last = self._work.collect(self._record.agg(F.max("slice").alias("last")), "counting")
        return int(last[0]["last"] or 0) + 1

    def _find_near(self, texts: DataFrame, parts: list[PreparedPart]) -> _Near:
        """Cluster the near-copies among different texts, as `find_near_duplicates` does."""
        work, settings = self._work, self._run.settings.near_duplicates
        if not settings.enabled:
            edges = work.empty(pairs.EDGE_SCHEMA)
            return _Near(edges, pairs.connect(work, edges), 0, 0)
        verifier = pairs.Verifier(work, texts, parts, settings)
        buckets = pairs.shared_buckets(work, texts, parts)
        stars = pairs.star_pairs(work, buckets)
        first, compared_first = verifier.verify(stars)
        clusters = pairs.connect(work, first)
        window = pairs.window_pairs(work, buckets, clusters, stars)
        second, compared_second = verifier.verify(window)
        # The clusters so far stand for all edges of the first pass, so these are not read again.
        if not second.isEmpty():
            linked = clusters.selectExpr("cluster as low", "text as high")
            clusters = pairs.connect(work, linked.union(second.select("low", "high")))
        return _Near(
            edges=first.union(second),
            clusters=clusters,
            candidates=stars.count() + window.count(),
            verified=compared_first + compared_second,
        )

    def _find_versions(
        self, texts: DataFrame, near: DataFrame, parts: list[PreparedPart]
    ) -> DataFrame:
        """Link the versions of a document (`pairs.PAIR_SCHEMA`), as in memory."""
        if not self._run.settings.near_duplicates.enabled:
            return self._work.empty(pairs.PAIR_SCHEMA)
        searched = texts.where(F.col("forced") <= history.TRAIN).join(near, "text", "left_anti")
        return pairs.find_versions(self._work, searched, parts)

    def _not_among(self, documents: DataFrame) -> PartRows:
        """Rows of the record whose texts none of these documents has, and are not forgotten."""
        if self._record is None:
            return PartRows({})
        # Forgotten text leaves the record, too: it would be written into the new corpus otherwise.
        forgotten = F.col("text_hash").isin(list(self._run.forgotten.hidden))
        missing = self._record.where(~forgotten).join(documents, "text_hash", "left_anti")
        return self._work.by_part(missing, decider.CHOSEN_SCHEMA, "comparing with the record")

    def _histogram(self, values: DataFrame) -> dict[int, int]:
        """The different values of a frame's one column, `value`, and how often each occurs."""
        rows = self._work.collect(values.groupBy("value").count(), "counting")
        return {int(row["value"]): int(row["count"]) for row in rows}


_PLACE = [("part", pa.int64()), ("row", pa.int64())]
PLACED_SCHEMA = pa.schema(
    [
        *_PLACE,
        *decider.DOCUMENT_SCHEMA,
        ("forced", pa.int64()),
        ("rank", pa.int64()),
        ("lasting_id", pa.string()),
    ]
)
"""A document, where it is, the code of the split that its source is assigned to, its rank among
documents of equal text (`history.representative_rank`), and its id unless that is a row's number.
"""
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


def _read_documents(
    _: int,
    item: tuple[int, PreparedPart],
    forgotten: ForgottenTexts,
    split: SplitSettings,
    numbered: Sequence[str],
) -> pa.Table:
    number, part = item
    documents = decider.read_documents(part, forgotten)
    forced = history.by_source(documents["source"], split)
    rank = history.representative_rank(documents["past"].to_numpy(), forced)
    numbers = are_row_numbers(documents["id"], documents["source"], numbered)
    lasting = pc.if_else(numbers, pa.scalar(None, pa.string()), documents["id"])
    columns = [*_places(number, documents), *documents.columns, pa.array(forced), pa.array(rank)]
    return pa.Table.from_arrays([*columns, lasting], schema=PLACED_SCHEMA)


def _read_record(number: int, part: Part) -> pa.Table:
    record = part.read(["id", "text_hash", "split", "slice"])
    splits = pa.array(history.codes_of(record["split"]))
    columns = [*_places(number, record), record["id"], record["text_hash"], splits, record["slice"]]
    return pa.Table.from_arrays(columns, schema=RECORD_SCHEMA)


def _places(number: int, table: pa.Table) -> list[pa.Array]:
    return [pa.array(np.full(table.num_rows, number)), pa.array(np.arange(table.num_rows))]


def group_exact(
    work: Work, documents: DataFrame, record: DataFrame | None, slice_: int
) -> DataFrame:
    """Group the documents without a fault by equal text.

    Args:
        record: of earlier corpora, if there is one.
        slice_: number of the corpus in its lineage.

    Returns:
        `text` (numbers that rise with the hash), `text_hash`, `part`, `row`, `id`, `characters`,
        `past`, `forced`, `slice`, `shape`, `label` (of the document that stands for the text),
        `by_text`, `by_id` (`history.TextFacts`), `members` (documents) and `present` (those still
        in the sources).
    """
    # The smallest of these rows is the best one. Spark compares structs field by field, so what
    # should be large is negated.
    best = F.struct(
        (-F.col("rank")).alias("rank"),
        (-F.col("characters")).alias("characters"),
        *("id", "part", "row", "past", "forced", "shape", "label"),
    )
    sound = _look_up(documents.where("fault is null"), record, slice_)
    forced = F.col("forced")
    is_unforced, is_new = forced == history.NONE, F.col("by_text") == history.NONE
    texts = (
        # Equal texts lie together in ranges, so that one shuffle and one sort do all of it.
        sound.repartitionByRange(work.partitions, "text_hash")
        .groupBy("text_hash")
        .agg(
            F.min(best).alias("best"),
            # Codes rise with strictness: where the documents of a text differ, the strictest
            # counts.
            F.max("by_text").alias("by_text"),
            F.max("by_id").alias("by_id"),
            # A text is as old as the first of its documents.
            F.min("slice").alias("slice"),
            F.max((forced == history.TRAIN) & ~F.col("past")).alias("to_train"),
            F.count("*").alias("members"),
            F.sum((~F.col("past")).cast("long")).alias("present"),
        )
        .select("*", "best.*")
        .withColumn("characters", -F.col("characters"))
        .withColumn(
            "forced", F.when(is_unforced & F.col("to_train"), history.TRAIN).otherwise(forced)
        )
        .withColumn("by_id", F.when(is_new, F.col("by_id")).otherwise(history.NONE))
        .drop("best", "rank", "to_train")
    )
    # Ranges come in order, and so do rows within: the numbers rise with the hash, as places do in
    # memory.
    numbered = texts.sortWithinPartitions("text_hash").select(
        F.monotonically_increasing_id().alias("text"), "*"
    )
    return work.keep(numbered, "grouping exact copies")


def thin_out(
    work: Work, documents: DataFrame, texts: DataFrame, keep: int | None
) -> tuple[DataFrame, DataFrame]:
    """What `in_memory.thin_out` gives: all documents, and the texts that are left."""
    forced, label = F.col("forced"), F.col("label")
    judges = forced >= history.VALIDATION
    # Rises where `history.representative_rank` falls, since the window sorts upwards.
    rank = F.when(judges, -forced).when(forced == history.REPLAY, 1).otherwise(0)
    is_new = F.col("by_text") == history.NONE
    times = F.when(label.isNotNull(), -F.col("members"))
    order = Window.partitionBy("shape").orderBy(is_new, rank, times, "text_hash")
    begin, between, end = map(F.lit, decider.CONTRADICTS)
    # Null without a label, as all of what is joined is then.
    said = F.concat(begin, label, between, F.first(label).over(order), end)
    ranked = texts.where("shape is not null and not past").select(
        *("text", "text_hash", "by_text", "label"),
        F.row_number().over(order).alias("rank"),
        F.coalesce(said, F.lit(decider.TEMPLATE)).alias("thinned"),
    )
    # Without a limit (`keep` is None) the comparison is null, and no text is too much.
    is_too_much = is_new & (F.col("rank") > F.when(label.isNotNull(), 1).otherwise(F.lit(keep)))
    too_many = ranked.where(is_too_much).select("text", "text_hash", "thinned")
    too_many = work.keep(too_many, "thinning templates out")
    if too_many.isEmpty():
        return documents, texts
    faults = documents.join(too_many.drop("text"), "text_hash", "left")
    faults = faults.withColumn("fault", F.coalesce("fault", "thinned")).drop("thinned")
    left = work.keep(texts.join(too_many, "text", "left_anti"), "thinning templates out")
    return faults, left


def _look_up(documents: DataFrame, record: DataFrame | None, slice_: int) -> DataFrame:
    """Join documents with what is on record of each: `by_text`, `by_id` and `slice`.

    If the record has a text or an id several times, the first place counts.
    """
    if record is None:
        unknown = F.lit(history.NONE).cast("long")
        return documents.select(
            *("*", unknown.alias("by_text"), unknown.alias("by_id")),
            F.lit(slice_).cast("long").alias("slice"),
        )
    first = F.min(F.struct("part", "row", "split", "slice", "id"))
    texts = record.groupBy("text_hash").agg(first.alias("known"))
    ids = record.groupBy(F.col("id").alias("lasting_id")).agg(first.alias("known_id"))
    past = F.col("past")

    def known(recorded: str, field: str, otherwise: int) -> F.Column:
        value = F.coalesce(F.col(f"known.{field}"), F.lit(otherwise))
        # Under other cleaning settings a text may have another hash than the one on record.
        return F.when(past, F.col(recorded).cast("long")).otherwise(value)

    is_same, judges = F.col("known.id") == F.col("id"), F.col("known.split") >= history.VALIDATION
    # A null comparison, of a text that is not on record, adds nothing.
    added = F.when(~is_same | past, 0).when(judges, history.ON_RECORD).when(is_same, 1).otherwise(0)
    return (
        documents.join(texts, "text_hash", "left")
        .withColumn("by_text", known("recorded_split", "split", history.NONE))
        .withColumn("slice", known("recorded_slice", "slice", slice_))
        .withColumn("rank", F.col("rank") + added)
        .join(ids, "lasting_id", "left")
        .withColumn("by_id", F.coalesce(F.col("known_id.split"), F.lit(history.NONE)))
    )


_FACTS = {name: f"cluster_{name}" for name in history.ClusterFacts.__dataclass_fields__}
"""Fields of `history.ClusterFacts` to their columns."""
_FATES = pa.schema(
    [
        ("cluster_reason", pa.string()),
        ("eligible", pa.bool_()),
        ("stays", pa.bool_()),
        ("split", pa.string()),
        ("is_free", pa.bool_()),
    ]
)


def decide_survivors(
    work: Work, texts: DataFrame, copies: DataFrame, versions: DataFrame, split: SplitSettings
) -> DataFrame:
    """Decide what becomes of every text.

    Args:
        texts: of `group_exact`.
        copies: the clusters of near-copies, of `pairs.connect`; `versions`: links between those of
            one document.

    Returns:
        The columns of `texts`; `cluster` and its `cluster_name`; `cluster_reason`, why all of a
        cluster goes (null: it does not); `stays`, and the `split` of a text that does; `survivor`,
        the id of the document that is kept in the text's place; `is_best`, whether it is the
        text's.
    """
    # As in memory, all texts of a shape are linked to the first of them.
    first = texts.where("shape is not null").groupBy("shape").agg(F.min("text").alias("low"))
    linked = texts.join(first, "shape").where("low < text").selectExpr("low", "text as high")
    links = copies.selectExpr("cluster as low", "text as high").union(linked)
    components = {"copies": copies, "cluster": pairs.connect(work, links)}
    if has_versions := not versions.isEmpty():
        components["family"] = pairs.connect(work, links.union(versions))
    clustered = texts
    for name, members in components.items():
        members = members.withColumnRenamed("cluster", name)
        clustered = clustered.join(members, "text", "left").withColumn(
            name, F.coalesce(name, "text")
        )
    clustered = clustered.drop("shape", "members")
    facts = pa.schema([(column, pa.int64()) for column in _FACTS.values()])
    # In Arrow batches, so that the rules are the same code as in memory.
    own = clustered.mapInArrow(_state_facts, _with_columns(clustered, facts))
    if has_versions:
        guard, trained, force = (F.col(_FACTS[name]) for name in ("guard", "trained", "force"))
        of_cluster, of_family = (Window.partitionBy(name) for name in ("cluster", "family"))
        own = own.withColumn("own_guard", F.max(guard).over(of_cluster))
        # Negative, since the first text of both may be the same.
        single = F.when(F.max(force).over(of_cluster) > history.NONE, -1 - F.col("cluster"))
        own = own.withColumn("family", F.coalesce(single, "family"))
        largest_codes = (F.max(column).over(of_family) for column in (guard, trained))
        is_apart = history.is_apart(F.col("own_guard"), *largest_codes)
        code = F.when(is_apart, F.col("own_guard")).otherwise(history.NONE)
        cluster = F.col("family") * len(history.NAMES) + code
        own = own.withColumn("cluster", cluster).drop("own_guard", "family")
    label = F.coalesce("label", F.lit(""))
    largest = own.groupBy("cluster").agg(
        *(F.max(column).alias(column) for column in _FACTS.values()),
        F.min("text_hash").alias("cluster_name"),
        F.sum((F.col("copies") == F.col("text")).cast("long")).alias("groups"),
        (F.min(label) == F.max(label)).alias("has_one_class"),
    )
    together = own.drop(*facts.names).join(largest, "cluster")
    rules = partial(_apply_rules, split=split)
    fates = together.mapInArrow(rules, _with_columns(together, _FATES))
    fates = work.keep(fates.drop(*facts.names, "groups", "has_one_class"), "deciding splits")
    # Eligible texts first, those of the newest corpus before others, then long ones, then small
    # ids; the smallest struct is the best.
    newest = F.when(F.col("eligible"), F.col("slice")).otherwise(0)
    order = F.struct(
        (-newest).alias("newest"),
        (-F.col("characters")).alias("characters"),
        *("id", "text"),
    )
    best = fates.groupBy("copies").agg(F.min(order).alias("best"))
    is_best = F.col("eligible") & (F.col("best.text") == F.col("text"))
    decided = (
        fates.join(best, "copies")
        .withColumn("stays", F.col("stays") | is_best)
        .withColumn("survivor", F.when(F.col("stays"), F.col("id")).otherwise(F.col("best.id")))
        .withColumn("is_best", F.col("best.text") == F.col("text"))
        .drop("best")
    )
    decided = work.keep(decided, "choosing survivors")
    labeled = decided.where("stays and label is not null")
    in_split = [F.max(F.col("split") == name) for name in ("held_out", "validation")]
    judged = labeled.groupBy("label").agg((in_split[0] & in_split[1]).alias("is_judged"))
    # Of few classes, each with few texts, or some would be held out by their hashes.
    lacking = labeled.join(judged.where("not is_judged"), "label", "left_semi")
    columns = ("label", F.col("cluster_name").alias("cluster"), "split", "is_free")
    rows = work.collect(lacking.select(*columns), "looking for classes that nothing judges")
    judges = history.judges_of_classes(pa.Table.from_pylist(rows, history.LABELED_SCHEMA))
    split_of = F.col("split")
    for judging in {*judges.values()}:
        names = [name for name, of_cluster in judges.items() if of_cluster == judging]
        split_of = F.when(F.col("cluster_name").isin(names), judging).otherwise(split_of)
    return decided.withColumn("split", split_of)


def _with_columns(frame: DataFrame, added: pa.Schema) -> StructType:
    return StructType([*frame.schema, *from_arrow_schema(added)])


def _facts_of(batch: pa.RecordBatch) -> history.TextFacts:
    return history.TextFacts(
        present=~batch["past"].to_numpy(zero_copy_only=False),
        forced=batch["forced"].to_numpy(),
        by_text=batch["by_text"].to_numpy(),
        by_id=batch["by_id"].to_numpy(),
        slices=batch["slice"].to_numpy(),
    )


def _state_facts(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Add to each text what it contributes to the facts about its cluster."""
    for batch in batches:
        # In the order of the fields, as the columns of `_FACTS` are.
        facts = vars(_facts_of(batch).for_cluster()).values()
        names = [*batch.schema.names, *_FACTS.values()]
        yield pa.record_batch([*batch.columns, *map(pa.array, facts)], names)


def _apply_rules(
    batches: Iterator[pa.RecordBatch], split: SplitSettings
) -> Iterator[pa.RecordBatch]:
    """Add to texts, which have the facts of their clusters, what becomes of each (`_FATES`)."""
    for batch in batches:
        facts = {name: batch[column].to_numpy() for name, column in _FACTS.items()}
        groups = batch["groups"].to_numpy()
        new = history.by_hash(batch["cluster_name"], split, groups)
        fates = history.decide(_facts_of(batch), history.ClusterFacts(**facts), new)
        outcome = [
            fates.reason,
            pa.array(fates.eligible),
            pa.array(fates.stays),
            pa.array(history.NAMES, pa.string()).take(pa.array(fates.split)),
            pc.and_(
                batch["has_one_class"], pa.array(fates.is_new & (groups <= history.MOST_GROUPS))
            ),
        ]
        yield pa.record_batch([*batch.columns, *outcome], [*batch.schema.names, *_FATES.names])


def _document_fates(documents: DataFrame, texts: DataFrame) -> DataFrame:
    """Every document with `reason` (null: stays), `survivor`, `cluster` and `neighbor`.

    `neighbor` represents the document's text; a document with a fault has none of the three.
    """
    names = ["id", "source", "bytes", "repaired", "part", "row"]
    of_text = texts.select(
        "text_hash",
        "stays",
        "cluster_reason",
        "is_best",
        "survivor",
        F.col("cluster_name").alias("cluster"),
        F.col("id").alias("neighbor"),
        F.struct("part", "row").alias("place"),
    )
    stands_for_it = F.col("place") == F.struct("part", "row")
    # A text that is its own best, and still goes, goes for its template.
    own = (
        F.when(stands_for_it & F.col("is_best"), decider.TEMPLATE)
        .when(stands_for_it, NEAR)
        .otherwise(EXACT)
    )
    reason = F.when(stands_for_it & F.col("stays"), F.lit(None)).otherwise(
        # What equals a text that stays is a copy of it and nothing else.
        F.coalesce(F.when(~F.col("stays"), F.col("cluster_reason")), own)
    )
    is_sound = F.col("fault").isNull()
    # Faulty documents are joined with no text: most of them have the hash of an empty one.
    hashed = documents.withColumn("text_hash", F.when(is_sound, F.col("text_hash")))
    return hashed.join(of_text, "text_hash", "left").select(
        *names,
        F.coalesce("fault", reason).alias("reason"),
        *("survivor", "cluster", "neighbor"),
        (is_sound & ~stands_for_it).alias("is_exact"),
    )


def _exact_copies(fates: DataFrame) -> DataFrame:
    """Rows of `DUPLICATE_SCHEMA`, each with its text's representative as the neighbor."""
    return fates.where("is_exact").select(
        *("id", "survivor", "cluster"),
        F.lit(EXACT).alias("reason"),
        "neighbor",
        F.lit(1.0).alias("similarity"),
    )


def _near_copies(texts: DataFrame, edges: DataFrame) -> DataFrame:
    """Rows of `DUPLICATE_SCHEMA`, each with the most similar text that it was compared with."""
    neighbors = edges.selectExpr("low as text", "high as other", "similarity").union(
        edges.selectExpr("high as text", "low as other", "similarity")
    )
    # Negated, so that the smallest struct has the largest similarity, and then the first text.
    order = F.struct((-F.col("similarity")).alias("unlike"), "other")
    nearest = neighbors.groupBy("text").agg(F.min(order).alias("nearest"))
    dropped = texts.where("not past and not stays and not is_best").join(nearest, "text")
    others = texts.select(F.col("text").alias("other"), F.col("id").alias("neighbor"))
    return (
        dropped.withColumn("other", F.col("nearest.other"))
        .join(others, "other")
        .select(
            *("id", "survivor", F.col("cluster_name").alias("cluster")),
            F.lit(NEAR).alias("reason"),
            "neighbor",
            (-F.col("nearest.unlike")).alias("similarity"),
        )
    )
