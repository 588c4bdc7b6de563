"""Checks on the assets, shown beside them in the UI."""

import itertools
import math

from dagster import AssetCheckResult, AssetCheckSeverity, asset_check

from artifacts.errors import DamagedArtifact
from artifacts.shards import ShardSet, ShardStats
from artifacts.store import Artifact
from llm_assets.assets.corpus import clean_corpus, tokenized_shards
from llm_assets.assets.evaluation import model_version
from llm_assets.assets.model import checkpoint
from llm_assets.resources.pipeline import PipelineResource
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
    clusters = {
        split: {
            cluster
            for shard in ShardSet(shards.path, stats, split).shards
            for cluster in shard.documents()["cluster"].to_pylist()
        }
        for split in {entry.split for entry in stats.shards if entry.rows}
    }
    shared = set().union(*(a & b for a, b in itertools.combinations(clusters.values(), 2)))
    return AssetCheckResult(
        passed=not shared,
        metadata={"shared_clusters": len(shared), "examples": ", ".join(sorted(shared)[:5])},
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


@asset_check(asset=checkpoint, blocking=True)
def loss_is_finite_and_falls(pipeline: PipelineResource) -> AssetCheckResult:
    """Every step's loss is a number, and validation ends below its start."""
    trained = _current(pipeline, "checkpoint")
    losses = [record["loss"] for record in read_metrics(trained.path)]
    validation = trained.stats["validation_bits_per_byte"]
    finite = all(math.isfinite(loss) for loss in [*losses, *validation.values()])
    return AssetCheckResult(
        passed=finite and validation["end"] < validation["start"],
        metadata={
            "all_finite": finite,
            "validation_bits_per_byte_before": validation["start"],
            "validation_bits_per_byte_after": validation["end"],
        },
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
