"""Checks on the assets, shown beside them in the UI."""

import math
from collections import Counter

from dagster import AssetCheckResult, AssetCheckSeverity, asset_check

from artifacts.errors import DamagedArtifact
from artifacts.shards.documents import find_shared_clusters
from artifacts.shards.format import ShardStats
from artifacts.store.store import Artifact
from llm_assets.assets.corpus import clean_corpus, raw_corpus, tokenized_shards
from llm_assets.assets.evaluation import VERDICT_NAME, eval_metrics, model_version
from llm_assets.assets.evaluation_metadata import number
from llm_assets.assets.model import base_model, checkpoint
from llm_assets.assets.serving import endpoint
from llm_assets.assets.stage import readable
from llm_assets.gate.verdict import Verdict
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.resource import RegistryResource
from recipes.spec import read_metrics


def _current(pipeline: PipelineResource, asset: str) -> Artifact:
    return pipeline.record.current(asset, needed_by=asset)


@asset_check(asset=raw_corpus)
def every_file_was_read(pipeline: PipelineResource) -> AssetCheckResult:
    """Nothing that was found in the sources was left out; what was is counted by kind."""
    stats = _current(pipeline, "raw_corpus").stats
    kinds = Counter(stats["unread"]) + Counter(stats["dropped"])
    left = kinds.total()
    counts = ", ".join(f"{count:,} {kind.replace('_', ' ')}" for kind, count in kinds.items())
    return AssetCheckResult(
        passed=not left,
        severity=AssetCheckSeverity.WARN,
        description=f"{left:,} files or documents were left out: {counts}; the asset's metadata "
        "names them."
        if left
        else None,
        metadata={"left_out": left, "documents": stats["documents"]},
    )


@asset_check(asset=base_model, blocking=True)
def weights_match_their_checksums(pipeline: PipelineResource) -> AssetCheckResult:
    """Every file of the base model has the size and the checksum of its manifest."""
    return _verify(_current(pipeline, "base_model"))


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
    shared = find_shared_clusters(shards.url, stats)
    return AssetCheckResult(
        passed=not shared,
        metadata={"shared_clusters": len(shared), "examples": ", ".join(shared[:5])},
    )


@asset_check(asset=tokenized_shards, blocking=True)
def shards_match_their_checksums(pipeline: PipelineResource) -> AssetCheckResult:
    """Every file has the size and the checksum of its manifest."""
    return _verify(_current(pipeline, "tokenized_shards"))


def _verify(artifact: Artifact) -> AssetCheckResult:
    try:
        artifact.verify()
    except DamagedArtifact as error:
        return AssetCheckResult(passed=False, description=str(error))
    return AssetCheckResult(passed=True, metadata={"files": len(artifact.manifest.files)})


@asset_check(asset=checkpoint)
def loss_is_finite_and_falls(pipeline: PipelineResource) -> AssetCheckResult:
    """Every step's loss is a number, and validation ends below its start.

    It blocks nothing: a candidate that diverged gets the gate's verdict, with its reasons.
    """
    trained = _current(pipeline, "checkpoint")
    losses = [record["loss"] for record in read_metrics(trained.url)]
    validation = trained.stats["validation"]
    start, end = validation["start"], validation["end"]
    bad = sum(loss is None or not math.isfinite(loss) for loss in losses)
    falls = None not in (start, end) and end < start
    said = "Every loss is a number." if not bad else f"{bad} losses are not finite numbers."
    diverged = trained.stats["diverged"]
    return AssetCheckResult(
        passed=not bad and falls and not diverged,
        severity=AssetCheckSeverity.WARN,
        description=f"{diverged or said} On validation text, {trained.stats['validation_unit']}: "
        f"{number(start)} before, {number(end)} after.",
        metadata={"losses_not_finite": bad, "validation_falls": falls},
    )


@asset_check(asset=eval_metrics)
def figures_are_finite(pipeline: PipelineResource) -> AssetCheckResult:
    """Every figure of the candidate's evaluation is a number."""
    metrics = _current(pipeline, "eval_metrics").stats["metrics"]
    found = {name: roles["candidate"]["value"] for name, roles in metrics.items()}
    missing = sorted(name for name, value in found.items() if value is None)
    return AssetCheckResult(
        passed=not missing,
        severity=AssetCheckSeverity.WARN,
        description=f"Not finite: {', '.join(missing)}" if missing else "All are numbers.",
        metadata={"figures": len(found), "not_finite": len(missing)},
    )


@asset_check(asset=model_version)
def candidate_is_promoted(pipeline: PipelineResource) -> AssetCheckResult:
    """Shows the gate's verdict; the endpoint reads the verdict itself."""
    judged = _current(pipeline, "model_version")
    verdict = Verdict.model_validate_json((judged.path / VERDICT_NAME).read_text())
    differences = {
        f"{one.task}_minus_{one.reference}": one.difference
        for one in verdict.comparisons
        if math.isfinite(one.difference)
    }
    return AssetCheckResult(
        passed=verdict.promoted,
        severity=AssetCheckSeverity.WARN,
        description=" ".join(judged.stats["reasons"]),
        metadata=readable(differences),
    )


@asset_check(asset=endpoint)
def wanted_version_serves(
    pipeline: PipelineResource, registry: RegistryResource
) -> AssetCheckResult:
    """What was decided on last is what answers."""
    state = registry.open(pipeline).state()
    wanted, champion = state.find("wanted"), state.find("champion")
    numbers = {
        name: version.version if version else -1
        for name, version in (("wanted", wanted), ("serving", champion))
    }
    return AssetCheckResult(
        passed=wanted is not None and wanted == champion,
        severity=AssetCheckSeverity.ERROR,
        description="wanted: version {wanted}, serving: version {serving}".format(**numbers),
        metadata=numbers,
    )
