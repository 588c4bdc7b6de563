"""Is the candidate better, and may it answer users?"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import dagster as dg
import pyarrow.parquet as pq

from artifacts.libraries import installed
from artifacts.shards.format import ShardStats
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft
from llm_assets.assets import figures
from llm_assets.assets.exam import answers_view
from llm_assets.assets.model import checkpoint_view
from llm_assets.assets.page import render_page
from llm_assets.assets.stage import OBJECTS, BuildPlan, draw, link, readable, stage, table
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import measure_as_served, quantized
from llm_assets.exam.questions import exam_shares
from llm_assets.gate.judge import judge, with_answers
from llm_assets.gate.verdict import CODE_VERSION as GATE_CODE_VERSION
from llm_assets.gate.verdict import Comparison, GateSettings, ModelVersionSettings, Verdict
from llm_assets.pipeline import PipelineResource
from llm_assets.registry import card
from llm_assets.registry.base import Registry
from llm_assets.registry.resource import RegistryResource
from llm_assets.registry.state import ModelEntry, ModelVersion, RegistryState
from llm_assets.runners.training import TrainingRunner
from llm_assets.tracing.explain import explain
from recipes.evaluation.exam import CLOSED_BOOK
from recipes.evaluation.exam import LIBRARIES as EXAM_LIBRARIES
from recipes.evaluation.settings import (
    CODE_VERSION,
    SAMPLES_NAME,
    SCORES_NAME,
    TASK_SCORES_NAME,
    EvaluationSettings,
    GateQuestion,
    GenerationSettings,
    Metric,
    ModelSource,
)
from recipes.evaluation.spec import EvaluationSpec
from recipes.settings import package_of
from recipes.spec import MODEL_FOLDER
from serving.settings import Weights

JUDGED_BY = ("eval_metrics", "exam")
"""Of what an evaluation was made from, that which is no part of the model."""
GROUP = "evaluation"
VERDICT_NAME = "verdict.json"
SERVING_LIBRARIES = {"nncf", "openvino", "openvino-genai"}
"""Those that decide the scores of quantized weights."""
ROLES = ("candidate", "incumbent", "base")
BOUNDS = ("low", "value", "high")
Figure = Mapping[str, float | None]
EXAM_FIGURES = (
    *("exam_result", "closed_book", "exam", "exam_by_relation"),
    *("questions_won", "questions_lost"),
)
GATE_FIGURES = ("earlier_comparisons_without_promotion", "comparisons", "differences")
PLACES = ("run_folder", "tensorboard")
"""Of a checkpoint, where it lies on this machine."""
UNMEASURED: Figure = {"value": None}
_UNBROKEN = re.compile("([!-~]{40})[!-~]+")
"""Characters of ASCII in a row, between which no browser breaks a line."""


@dataclass(frozen=True)
class Challenge:
    """A candidate and the model that it is held against."""

    candidate: ModelSource
    incumbent: ModelVersion
    look: int
    """1, and one more for each comparison of the pipeline's life that could have promoted and did
    not."""
    readable: int
    """Judgements before the procedure was chosen."""
    procedure: str
    """What people chose for this candidate, down to how it is measured and judged."""
    form: dict[str, str]
    """The format that weights are quantized to, by its name in settings; empty where they serve as
    they were trained."""

    def asked(self) -> dict[str, Any]:
        """What the gate is told besides the scores."""
        return {"look": self.look, "readable": self.readable, "procedure": self.procedure}

    def judge(self, evaluation: Artifact, gate: GateSettings) -> Verdict:
        """What the gate says to the scores of an evaluation."""
        scores = pq.read_table(evaluation.path / SCORES_NAME)
        answers = evaluation.path / TASK_SCORES_NAME
        if gate.metric == "exam" and answers.exists():
            scores = with_answers(scores, pq.read_table(answers))
        models: Any = {
            "candidate": self.candidate.fingerprint,
            "incumbent": self.incumbent.weights,
        }
        return judge(scores, evaluation.stats, gate, **models, **self.asked())

    def question(self, gate: GateSettings) -> GateQuestion | None:
        """What the evaluation measures held-out text for; None where an exam decides."""
        if gate.metric == "exam":
            return None
        limits = gate.model_dump(include={"lifetime_error", "smallest_effect"})
        return GateQuestion(look=self.look, readable=self.readable, **limits)


def open_challenge(
    pipeline: PipelineResource,
    models: Registry,
    candidate: Artifact,
    base: Artifact,
    weights: Weights | None,
    measured: str | None = None,
) -> Challenge:
    """Hold a candidate against the wanted model; the base model is registered where it is new.

    Args:
        weights: the format that they are quantized to; None where they serve as trained.
        measured: fingerprint of the evaluation; None before there is one.
    """
    # Before the state is read: until a candidate is better, the base model is the incumbent.
    models.register_base(base_entry(base))
    state, source, settings = models.state(), model_source(candidate), pipeline.settings
    incumbent = state.incumbent_of(source.fingerprint)
    comparison = (source.fingerprint, incumbent.weights, measured)
    gate = settings.model_version.gate
    form: dict[str, str] = {"served_weights": weights} if weights else {}
    judged_by = _judged_by(settings) | form
    if settings.exam and gate.metric == "exam":
        judged_by["exam"] = settings.exam.chosen()
    procedure = card.procedure(candidate, judged_by)
    look = state.look_of(*comparison, gate)
    # Earlier releases hashed the license and the shown texts into the procedure as well. Verdicts
    # are looked up by both hashes, so that an upgrade does not count as choosing another procedure.
    with_all = {"eval_metrics": settings.eval_metrics, "gate": settings.model_version}
    # With the license and the texts that are only shown, as `_judged_by` leaves them out.
    named_all = judged_by | {name: section.content() for name, section in with_all.items()}
    readable = min(
        state.readable_before(*comparison, variant, gate.metric)
        for variant in (procedure, card.procedure(candidate, named_all))
    )
    return Challenge(source, incumbent, look, readable, procedure, form)


def _judged_by(settings: PipelineSettings) -> dict[str, Any]:
    """What people chose for measuring and judging candidates.

    Texts that are only shown and the license choose no candidate, so they stand as their defaults.
    """
    evaluation = settings.eval_metrics.model_copy(update={"generation": GenerationSettings()})
    gate = settings.model_version.model_copy(update={"license": None})
    content, scoring = settings.checkpoint.content(), settings.checkpoint.scoring()
    # What decides the weights as well stands with the checkpoint.
    scoring_only = {name: value for name, value in scoring.items() if name not in content}
    return {"eval_metrics": evaluation.content(), "gate": gate.content()} | scoring_only


def base_entry(base: Artifact) -> ModelEntry:
    """The `base_model` artifact as the registry records it."""
    return ModelEntry(
        weights=model_source(base).fingerprint,
        model_fingerprint=base.fingerprint,
        model_url=base.url,
        license=base.stats["license"],
        lineage=card.lineage(base),
    )


def candidate_entry(candidate: Artifact, evaluation: Artifact, license: str) -> ModelEntry:
    """A `checkpoint` artifact as the registry records it, with what was measured of it."""
    source, evaluation_lineage = model_source(candidate), card.lineage(evaluation)
    return ModelEntry(
        weights=source.fingerprint,
        model_fingerprint=candidate.fingerprint,
        model_url=source.path,
        license=license,
        # The evaluation may be on newer text than the weights were trained on, which is none of it.
        lineage={kind: evaluation_lineage[kind] for kind in JUDGED_BY if kind in evaluation_lineage}
        | card.lineage(candidate),
        coverage=candidate.stats["coverage"],
        dollars=card.dollars_of(evaluation),
        evaluation=evaluation.stats,
    )


def model_source(artifact: Artifact) -> ModelSource:
    """The Hugging Face folder of a `checkpoint` or `base_model`, known by its weights."""
    folder = f"{MODEL_FOLDER}/" if artifact.manifest.kind == "checkpoint" else ""
    return ModelSource(
        path=f"{artifact.url}/{folder}".rstrip("/"),
        fingerprint=card.weights_fingerprint(artifact, folder),
    )


def eval_view(artifact: Artifact) -> dict[str, Any]:
    """What people see of `eval_metrics`."""
    return metrics_view(artifact.stats) | answers_view(artifact) | samples_view(artifact)


def metrics_view(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of `eval_metrics` from its stats; None stands for a figure that is not finite."""
    metrics = stats["metrics"]
    values, bounds = [], []
    for name, roles in metrics.items():
        cells = [
            card.number(roles[role]["value"]) if role in roles else "not measured" for role in ROLES
        ]
        values.append((_spaced(name), *cells))
        for role in ROLES:
            if (low := roles.get(role, UNMEASURED).get("low")) is not None:
                bounds.append(
                    (_spaced(name), role, card.number(low), card.number(roles[role]["high"]))
                )
    metric = Metric.model_validate(stats["metric"])
    held_out = metrics[f"held_out_{metric.name}"]
    plotted = {
        name: by_role.get("candidate", UNMEASURED)["value"] for name, by_role in metrics.items()
    }
    before, after = (
        card.number(held_out.get(role, UNMEASURED)["value"]) for role in ("base", "candidate")
    )
    return (
        {
            "summary": f"{before} -> {after} {metric.unit} on held-out text",
            "evaluation_fingerprint": stats["evaluation_fingerprint"],
            "metrics": table(["metric", *ROLES], values),
            "bounds": table(["metric", "model", "low", "high"], bounds),
            "intervals": figures.intervals(
                f"{metric.unit} on held-out text, with 95% intervals",
                metric.unit,
                {role: tuple(map(figure.get, BOUNDS)) for role, figure in held_out.items()},
            ),
        }
        | {name: value for name, value in plotted.items() if value is not None}
        | _confusion(stats)
        | _exam(stats)
    )


def _exam(stats: Mapping[str, Any]) -> dict[str, Any]:
    if not (exam := stats.get("exam")):
        return {}
    shares = ([name, *map(card.number, values)] for name, *values in exam_shares(stats))
    conditions = table(["condition", "base", "candidate"], shares)
    return {"exam_result": exam["sentence"], "exam": conditions}


def samples_view(evaluation: Artifact) -> dict[str, Any]:
    """What base and candidate write after the same beginnings, side by side; none where none do."""
    samples = read_samples(evaluation)
    pairs = zip(samples.get("base", []), samples.get("candidate", []), strict=False)
    rows = [
        [_legible(text) for text in (base["prompt"], base["completion"], candidate["completion"])]
        for base, candidate in pairs
    ]
    heads = ["after", "the base model says", "the candidate says"]
    return {"samples": table(heads, rows)} if rows else {}


def _legible(text: str) -> str:
    """Text for a cell, where models that have not learnt write dots without end."""
    return _UNBROKEN.sub("\\1…", text)


def read_samples(evaluation: Artifact) -> dict[str, list[dict[str, str]]]:
    """Role to what that model wrote, from an `eval_metrics` artifact."""
    content = (evaluation.path / SAMPLES_NAME).read_text()
    samples: dict[str, list[dict[str, str]]] = json.loads(content)
    return samples


def _confusion(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Of a classifier, which classes the candidate takes for which."""
    details = stats.get("details", {}).get("candidate", {})
    if "confusion" not in details:
        return {}
    title, axes = "The candidate on held-out examples", ("predicted class", "true class")
    picture = figures.matrix(title, *axes, details["labels"], details["confusion"])
    return {"confusion_matrix": picture}


def _spaced(name: str) -> str:
    """A name that may be broken at its spaces, so that its table fits the page."""
    return name.replace("_", " ")


def figures_are_finite(eval_metrics: Artifact) -> dg.AssetCheckResult:
    """Every figure of the candidate's evaluation is a number."""
    metrics, faults = (eval_metrics.stats[name] for name in ("metrics", "faults"))
    values = {
        name: by_role.get("candidate", UNMEASURED)["value"] for name, by_role in metrics.items()
    }
    missing = sorted(name for name, value in values.items() if value is None)
    description = (
        f"Not finite: {', '.join(missing)}" if missing else "All figures are finite numbers."
    )
    if "candidate" in faults:
        description = f"The candidate was not measured: {faults['candidate']}"
    return dg.AssetCheckResult(
        passed=not missing,
        severity=dg.AssetCheckSeverity.WARN,
        description=description,
        metadata={"figures": len(values), "not_finite": len(missing)},
    )


@stage(
    code_version=CODE_VERSION,
    group=GROUP,
    kinds={"pytorch"},
    pool="training",
    view=eval_view,
    checks=[figures_are_finite],
)
def eval_metrics(
    context: dg.AssetExecutionContext,
    pipeline: PipelineResource,
    training: TrainingRunner,
    registry: RegistryResource,
    identity: Identity,
    checkpoint: Artifact,
    base_model: Artifact,
    exam: Artifact | None,
) -> BuildPlan:
    """Candidate, base and incumbent models, measured on the same text.

    Held-out text is your own, and no candidate is trained on it. For plain text the figure is bits
    per byte, where lower is better. Models that predict text are also measured on everyday English,
    which shows what was forgotten. `samples` shows how base and candidate continue the same texts.
    """
    settings = pipeline.settings.measured
    shards = pipeline.record.current("tokenized_shards", needed_by="eval_metrics")
    weights = quantized(pipeline.settings)
    gate, models = pipeline.settings.model_version.gate, registry.open(pipeline)
    begin = partial(open_challenge, pipeline, models, checkpoint, base_model, weights)

    def asking(challenge: Challenge) -> Identity:
        question = challenge.question(gate)
        question_settings = {"question": question and question.model_dump()} | challenge.form
        return identity.extend(
            settings=settings.content()
            | pipeline.settings.checkpoint.scoring()
            | question_settings,
            inputs={"tokenized_shards": shards.fingerprint}
            | {"incumbent": challenge.incumbent.model_fingerprint},
            libraries=settings.libraries
            | package_of(pipeline.settings.checkpoint)
            | (EXAM_LIBRARIES if exam else set())
            | (SERVING_LIBRARIES if weights else set()),
        )

    challenge = begin()
    # An evaluation that exists keeps the number of the look that it was judged at. A new one is one
    # more comparison, measured with the share of error that it will be judged with.
    state, candidate = models.state(), challenge.candidate.fingerprint
    version = state.find_model(candidate)
    judged_by = version.lineage.get("eval_metrics") if version else None
    for evaluation in state.evaluations_of(candidate):
        earlier = begin(evaluation)
        earlier_identity = asking(earlier)
        # One that was judged but is gone or damaged is measured again under its old number.
        if earlier_identity.fingerprint == judged_by or pipeline.store.find(earlier_identity):
            challenge = earlier
    incumbent, question = challenge.incumbent, challenge.question(gate)

    def build(draft: Draft) -> None:
        reference = ModelSource(path=incumbent.model_url, fingerprint=incumbent.weights)
        candidate_settings = settings.drawn_for(challenge.candidate.fingerprint)
        spec = evaluation_spec(
            pipeline, draft, checkpoint, shards, base_model, reference, candidate_settings
        )
        update: dict[str, Any] = {"question": question}
        if exam:
            libraries = spec.libraries | installed(EXAM_LIBRARIES)
            update |= {"exam": exam.url, "libraries": libraries}
        spec = spec.model_copy(update=update)
        draft.stats |= training.evaluate(context, spec)
        draft.stats |= measure_as_served(pipeline.settings, spec, context.log.info)

    return BuildPlan(asking(challenge), build)


def evaluation_spec(
    pipeline: PipelineResource,
    draft: Draft,
    candidate: Artifact,
    shards: Artifact,
    base: Artifact,
    incumbent: ModelSource | None,
    settings: EvaluationSettings,
) -> EvaluationSpec:
    """What measures a checkpoint, its base and an incumbent into a draft.

    Raises:
        DamagedArtifact: a file of the shards or the incumbent has changed.
    """
    shards.verify()
    if incumbent is not None:
        card.verify_model(pipeline.record, str(incumbent.path), weights=incumbent.fingerprint)
    # A training that diverged still gets a verdict: the evaluation records the fault, not figures.
    fault = {"fault": candidate.stats.get("diverged")}
    return EvaluationSpec(
        base=model_source(base),
        candidate=model_source(candidate).model_copy(update=fault),
        incumbent=incumbent,
        shards=shards.url,
        shard_stats=ShardStats.model_validate(shards.stats),
        output=draft.url,
        cache=pipeline.store.cache,
        settings=settings,
        recipe=pipeline.settings.checkpoint,
        libraries=installed(settings.libraries),
    )


def verdict_view(artifact: Artifact) -> dict[str, Any]:
    """What people see of a `model_version`."""
    verdict = read_verdict(artifact)
    evaluation = artifact.store.load("eval_metrics", artifact.manifest.inputs["eval_metrics"])
    comparisons = verdict.comparisons
    rows = [
        (
            f"{_spaced(c.task)} against {c.reference}",
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


def _units(comparisons: list[Comparison]) -> str:
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
    code_version=GATE_CODE_VERSION,
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
