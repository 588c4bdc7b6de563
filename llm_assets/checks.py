"""Checks on the assets, shown beside them in the UI."""

import math

import pyarrow as pa
import pyarrow.compute as pc
from dagster import AssetCheckResult, AssetCheckSeverity, asset_check

from artifacts.errors import DamagedArtifact
from artifacts.shards.shard_set import ShardSet, ShardStats
from artifacts.store.store import Artifact
from llm_assets.assets.corpus import clean_corpus, tokenized_shards
from llm_assets.assets.evaluation import model_version
from llm_assets.assets.model import checkpoint
from llm_assets.pipeline import PipelineResource
from recipes.spec import read_metrics


def _current(pipeline: PipelineResource, asset: str) -> Artifact:
    return pipeline.record.current(asset, needed_by=asset)


@asset_check(asset=clean_corpus, blocking=True)
def corpus_is_not_empty(pipeline: PipelineResource) -> AssetCheckResult:
    """At least one document is left after cleaning."""
    documents = _current(pipeline, "clean_corpus").stats["documents"]
    return AssetCheckResult(passed=documents > 0, metadata={"documents": documents})


@asset_check(asset=tokenized_shards, blocking=True)
def no_cluster_in_two_splits(pipeline: PipelineResource) -> AssetCheckResult:
    """No duplicate cluster reaches from one split into another."""
    shards = _current(pipeline, "tokenized_shards")
    stats = ShardStats.model_validate(shards.stats)
    tables = []
    for split in {entry.split for entry in stats.shards if entry.rows}:
        for shard in ShardSet(shards.path, stats, split).shards:
            clusters = pc.unique(shard.documents()["cluster"])
            splits = pa.repeat(split, len(clusters))
            tables.append(pa.table({"cluster": clusters, "split": splits}))
    counts = pa.concat_tables(tables).group_by("cluster").aggregate([("split", "count_distinct")])
    shared = counts.filter(pc.greater(counts["split_count_distinct"], 1))["cluster"]
    return AssetCheckResult(
        passed=not len(shared),
        metadata={
            "shared_clusters": len(shared),
            "examples": ", ".join(sorted(shared.to_pylist())[:5]),
        },
    )


@asset_check(asset=tokenized_shards, blocking=True)
def shards_match_their_checksums(pipeline: PipelineResource) -> AssetCheckResult:
    """Every file has the size and the checksum of its manifest."""
    shards = _current(pipeline, "tokenized_shards")
    try:
        shards.verify()
    except DamagedArtifact as error:
        return AssetCheckResult(passed=False, description=str(error))
    return AssetCheckResult(passed=True, metadata={"files": len(shards.manifest.files)})


@asset_check(asset=checkpoint)
def loss_is_finite_and_falls(pipeline: PipelineResource) -> AssetCheckResult:
    """Every step's loss is a number, and validation ends below its start.

    It blocks nothing: a candidate that diverged gets the gate's verdict, with its reasons.
    """
    trained = _current(pipeline, "checkpoint")
    losses = [record["loss"] for record in read_metrics(trained.path)]
    validation = trained.stats["validation_bits_per_byte"]
    start, end = validation["start"], validation["end"]
    bad = sum(loss is None or not math.isfinite(loss) for loss in losses)
    falls = None not in (start, end) and end < start
    said = "Every loss is a number." if not bad else f"{bad} losses are not finite numbers."
    return AssetCheckResult(
        passed=not bad and falls,
        severity=AssetCheckSeverity.WARN,
        description=f"{said} Bits per byte on validation text: {start} before, {end} after.",
        metadata={"losses_not_finite": bad, "validation_falls": falls},
    )


@asset_check(asset=model_version)
def candidate_is_promoted(pipeline: PipelineResource) -> AssetCheckResult:
    """Shows the gate's verdict; the endpoint reads the verdict itself."""
    stats = _current(pipeline, "model_version").stats
    return AssetCheckResult(
        passed=stats["promoted"],
        severity=AssetCheckSeverity.WARN,
        description=" ".join(stats["reasons"]),
    )
