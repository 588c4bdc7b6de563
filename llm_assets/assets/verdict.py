"""May the candidate answer users? The gate's verdict, the version, and the page about it."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft
from llm_assets.assets import figures
from llm_assets.assets.evaluation import (
    GROUP,
    candidate_entry,
    eval_view,
    open_challenge,
    samples_view,
    spaced,
)
from llm_assets.assets.exam import answers_view
from llm_assets.assets.model import checkpoint_view
from llm_assets.assets.page import render_page
from llm_assets.assets.stage import OBJECTS, BuildPlan, draw, link, readable, stage, table
from llm_assets.gate.verdict import CODE_VERSION, Comparison, ModelVersionSettings, Verdict
from llm_assets.pipeline import PipelineResource
from llm_assets.registry import card
from llm_assets.registry.resource import RegistryResource
from llm_assets.registry.state import ModelVersion, RegistryState
from llm_assets.tracing.explain import explain
from recipes.evaluation.exam import CLOSED_BOOK

VERDICT_NAME = "verdict.json"
EXAM_FIGURES = (
    *("exam_result", "closed_book", "exam", "exam_by_relation"),
    *("questions_won", "questions_lost"),
)
GATE_FIGURES = ("earlier_comparisons_without_promotion", "comparisons", "differences")
PLACES = ("run_folder", "tensorboard")
"""Of a checkpoint, where it lies on this machine."""


def verdict_view(artifact: Artifact) -> dict[str, Any]:
    """What people see of a `model_version`."""
    verdict = read_verdict(artifact)
    evaluation = artifact.store.load("eval_metrics", artifact.manifest.inputs["eval_metrics"])
    comparisons = verdict.comparisons
    rows = [
        (
            f"{spaced(c.task)} against {c.reference}",
            c.difference,
            f"{card.number(c.low)} to {card.number(c.high)}" if c.low is not None else "unbounded",
            f"{100 * (1 - 2 * c.level):.6g}%",
            f"{c.clusters:,} {'facts' if c.task == CLOSED_BOOK else 'independent documents'}",
        )
        for c in comparisons
    ]
    heads = ["comparison", "difference", "interval", "confidence", "measured on"]
    return {
        "summary": "promoted" if verdict.promoted else "rejected",
        "promoted": verdict.promoted,
        "reasons": verdict.summary,
        "earlier_comparisons_without_promotion": verdict.look - 1,
        "comparisons": table(heads, rows),
        "differences": figures.intervals(
            "Candidate minus reference",
            _units(comparisons),
            {f"{c.task} against {c.reference}": (c.low, c.difference, c.high) for c in comparisons},
        ),
    } | samples_view(evaluation)


def _units(comparisons: Sequence[Comparison]) -> str:
    """The unit of the compared figures, and which way is better."""
    better = {(c.unit, "above" if c.higher_is_better else "below") for c in comparisons}
    return ", ".join(f"{unit} ({side} zero is better)" for unit, side in sorted(better))


def read_verdict(model_version: Artifact) -> Verdict:
    return Verdict.model_validate_json((model_version.path / VERDICT_NAME).read_text())


def version_page(
    state: RegistryState, version: ModelVersion, verdict: Artifact, cost_per_hour: float | None
) -> str:
    """A page about a version that was just judged, from what the UI shows of its stages."""
    store, inputs = verdict.store, verdict.manifest.inputs
    evaluation = store.load("eval_metrics", inputs["eval_metrics"])
    candidate = store.load("checkpoint", evaluation.manifest.inputs["checkpoint"])
    training = checkpoint_view(candidate) | card.training_cost(candidate.stats, cost_per_hour)
    view = eval_view(evaluation) | answers_view(evaluation, most=None)
    exam = {name: view[name] for name in EXAM_FIGURES if name in view}
    gate = verdict_view(verdict) if read_verdict(verdict).comparisons else {}
    sections = {
        "What it knows": exam,
        "The gate": {name: value for name, value in gate.items() if name in GATE_FIGURES},
        "What it writes": {name: value for name, value in view.items() if name == "samples"},
        "Training": {name: value for name, value in training.items() if name not in PLACES},
    }
    title, now = f"Version {version.version}", datetime.now(UTC)
    as_of = f"- As of {now:%Y-%m-%d %H:%M} UTC; later decisions are not shown on this page"
    head = card.render_card(state, version).replace(card.PAGE_LINE, as_of)
    drawn_sections = {heading: draw(section, store.cache) for heading, section in sections.items()}
    return render_page(title, head, drawn_sections, explain(store, state, version))


def candidate_is_promoted(model_version: Artifact) -> dg.AssetCheckResult:
    """Shows the gate's verdict and blocks nothing: `endpoint` serves the wanted version."""
    verdict = read_verdict(model_version)
    differences = {
        f"{comparison.task}_minus_{comparison.reference}": comparison.difference
        for comparison in verdict.comparisons
        if math.isfinite(comparison.difference)
    }
    return dg.AssetCheckResult(
        passed=verdict.promoted,
        severity=dg.AssetCheckSeverity.WARN,
        description=" ".join(model_version.stats["reasons"]),
        metadata=readable(differences),
    )


@stage(
    code_version=CODE_VERSION,
    group=GROUP,
    kinds={"python"},
    pool="registry",
    view=verdict_view,
    checks=[candidate_is_promoted],
)
def model_version(
    pipeline: PipelineResource,
    registry: RegistryResource,
    identity: Identity,
    settings: ModelVersionSettings,
    eval_metrics: Artifact,
) -> BuildPlan:
    """The candidate registered, with its evaluation and the gate's verdict.

    The gate promotes a candidate that is better than the wanted version by more than chance and
    meets its other conditions; `reasons` says what it found. `llm-assets approve` and
    `llm-assets reject` overrule it.
    """
    manifest = eval_metrics.manifest
    candidate, base = (
        pipeline.store.load(kind, manifest.inputs[kind], needed_by="model_version")
        for kind in ("checkpoint", "base_model")
    )
    models = registry.open(pipeline)
    weights, stats = manifest.settings.get("served_weights"), manifest.stats
    challenge = open_challenge(
        pipeline, models, candidate, base, weights, stats["evaluation_fingerprint"]
    )

    def build(draft: Draft) -> None:
        candidate.verify()
        verdict = challenge.judge(eval_metrics, settings.gate)
        (draft.path / VERDICT_NAME).write_text(verdict.model_dump_json(indent=2))
        draft.stats["promoted"] = verdict.promoted
        draft.stats["reasons"] = verdict.lines

    def register(artifact: Artifact) -> dict[str, Any]:
        license = settings.license or base.stats["license"]
        verdict = read_verdict(artifact)
        # In every run, not only the one that built the verdict, which may have been killed before
        # this.
        version = models.enter(candidate_entry(candidate, eval_metrics, license), verdict)
        place = card.page_path(pipeline.settings.name, version.version)
        price = pipeline.settings.automation.cost_per_hour
        state = models.state()
        page = version_page(state, version, artifact, price)
        pipeline.store.write_bytes(place, page.encode())
        cost = {} if version.dollars is None else {"version_cost": card.describe_cost(version)}
        return {
            "summary": f"version {version.version} {card.describe_outcome(state, verdict)}",
            "version": version.version,
            "trained_on": card.describe_coverage(version),
            "page": link(f"{pipeline.store.root}/{place}", OBJECTS),
            **cost,
        }

    # The number of the look is part of the identity: the same scores may get another verdict later.
    identity = identity.extend(
        settings=settings.content() | challenge.asked(),
        inputs={"incumbent": challenge.incumbent.model_fingerprint},
    )
    return BuildPlan(identity, build, finish=register)
