"""Enters a judged candidate into the registry, and makes it champion where the verdict says so."""

from artifacts.store import Artifact
from llm_assets.gate.verdict import Verdict
from llm_assets.registry.base import ModelEntry, ModelVersion, Registry
from llm_assets.registry.lineage import lineage
from recipes.evaluation.settings import ModelSource


def enter_candidate(
    registry: Registry,
    evaluation: Artifact,
    candidate: ModelSource,
    verdict: Verdict,
    license_name: str,
) -> ModelVersion:
    """Register the candidate, and promote it if it is accepted and never was champion before.

    Asked for again it changes nothing, so a rollback to an older version stays.
    """
    version = registry.register(
        ModelEntry(
            model_fingerprint=candidate.fingerprint,
            model_url=candidate.path,
            license=license_name,
            lineage=lineage(evaluation),
            evaluation=evaluation.stats,
            verdict=verdict,
        )
    )
    was_champion = any(
        move.version == version.version and move.alias == "champion" for move in registry.history()
    )
    if version.verdict and version.verdict.accepted and not was_champion:
        registry.promote(version.version, verdict.summary)
    return version


def enter_base(registry: Registry, base: Artifact, model: ModelSource, license_name: str) -> None:
    """Make the base model version 0, which serves until a candidate is better."""
    registry.register_base(
        ModelEntry(
            model_fingerprint=model.fingerprint,
            model_url=model.path,
            license=license_name,
            lineage=lineage(base),
        )
    )
