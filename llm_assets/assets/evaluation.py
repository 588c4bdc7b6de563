"""How good is the candidate? It is challenged to be better than the model that serves.

First the challenge, which `model_version` opens as well, to judge it. Then how its models are
measured, what people see of it, and the stage.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import dagster as dg
import pyarrow.parquet as pq

from artifacts.libraries import installed
from artifacts.shards.format import ShardStats
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.assets import figures
from llm_assets.assets.exam import answers_view
from llm_assets.assets.stage import BuildPlan, stage, table
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import measure_as_served, quantized
from llm_assets.exam.questions import exam_shares
from llm_assets.gate.judge import judge, with_answers
from llm_assets.gate.verdict import GateSettings, Verdict
from llm_assets.pipeline import PipelineResource
from llm_assets.registry import card
from llm_assets.registry.base import Registry
from llm_assets.registry.resource import RegistryResource
from llm_assets.registry.state import ModelEntry, ModelVersion
from llm_assets.runners.training import TrainingRunner
from llm_assets.tracing.explain import read_samples
from recipes.evaluation.exam import LIBRARIES as EXAM_LIBRARIES
from recipes.evaluation.settings import (
    CODE_VERSION,
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

GROUP = "evaluation"
JUDGED_BY = ("eval_metrics", "exam")
"""Of what an evaluation was made from, that which is no part of the model."""
SERVING_LIBRARIES = {"nncf", "openvino", "openvino-genai"}
"""Those that decide the scores of quantized weights."""
ROLES = ("candidate", "incumbent", "base")
BOUNDS = ("low", "value", "high")
Figure = Mapping[str, float | None]
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
        candidate, incumbent = self.candidate.fingerprint, self.incumbent.weights
        return judge(
            scores, evaluation.stats, gate, candidate=candidate, incumbent=incumbent, **self.asked()
        )

    def question(self, gate: GateSettings) -> GateQuestion | None:
        """What the evaluation measures held-out text for; None where an exam decides."""
        if gate.metric == "exam":
            return None
        # By these the evaluation tells, after each round, whether the verdict is certain already.
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
        # How facts are asked about is a choice, and somebody may choose by the scores of earlier
        # candidates. The facts themselves are data.
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


@dataclass(frozen=True)
class Measurement:
    """What measures a checkpoint, its base and an incumbent, and on which text."""

    pipeline: PipelineResource
    candidate: Artifact
    base: Artifact
    shards: Artifact
    settings: EvaluationSettings
    incumbent: ModelVersion | None = None
    exam: Artifact | None = None
    question: GateQuestion | None = None
    split: Literal["held_out", "validation"] = "held_out"

    @property
    def libraries(self) -> set[str]:
        """Those that decide the scores."""
        return self.settings.libraries | (EXAM_LIBRARIES if self.exam else set())

    def identity(self, stage: Identity, more: dict[str, Any]) -> Identity:
        """What decides the figures: what the stage has already, and settings besides its own."""
        recipe = self.pipeline.settings.checkpoint
        inputs = {"tokenized_shards": self.shards.fingerprint}
        if self.incumbent:
            inputs["incumbent"] = self.incumbent.model_fingerprint
        return stage.extend(
            settings=self.settings.content() | recipe.scoring() | more,
            inputs=inputs,
            libraries=self.libraries | package_of(recipe),
        )

    def spec(self, draft: Draft) -> EvaluationSpec:
        """What the program is told, to measure into a draft.

        Raises:
            DamagedArtifact: a file of the shards or the incumbent has changed.
        """
        # The stage takes the shards from the record and not as an input, so nothing else verifies
        # them.
        self.shards.verify()
        incumbent = None
        if self.incumbent:
            # Compared only with the weights that were registered: other files in their place are
            # another model.
            url, weights = self.incumbent.model_url, self.incumbent.weights
            card.verify_model(self.pipeline.record, url, weights=weights)
            incumbent = ModelSource(path=url, fingerprint=weights)
        # A training that diverged still gets a verdict: the evaluation records the fault, not
        # figures.
        fault = {"fault": self.candidate.stats.get("diverged")}
        return EvaluationSpec(
            base=model_source(self.base),
            candidate=model_source(self.candidate).model_copy(update=fault),
            incumbent=incumbent,
            shards=self.shards.url,
            shard_stats=ShardStats.model_validate(self.shards.stats),
            exam=self.exam.url if self.exam else None,
            output=draft.url,
            cache=self.pipeline.store.cache,
            settings=self.settings,
            recipe=self.pipeline.settings.checkpoint,
            split=self.split,
            libraries=installed(self.libraries),
            question=self.question,
        )


def challenge_to_measure(
    models: Registry,
    store: Store,
    begin: Callable[..., Challenge],
    identity_of: Callable[[Challenge], Identity],
) -> Challenge:
    """The candidate's challenge: the newest that it was measured for before, else a new one.

    An evaluation that exists keeps the number of the look that it was judged at. A new one is one
    more comparison, measured with the share of error that it will be judged with.

    Args:
        begin: opens a new challenge or, given an evaluation's fingerprint, as it was then.
        identity_of: what the evaluation of a challenge is made from.
    """
    # Registers the base model, so the state is read afterwards.
    challenge = begin()
    state, candidate = models.state(), challenge.candidate.fingerprint
    version = state.find_model(candidate)
    judged_by = version.lineage.get("eval_metrics") if version else None
    # The oldest one comes first, so that of those that fit the newest remains.
    for evaluation in state.evaluations_of(candidate):
        earlier = begin(evaluation)
        identity = identity_of(earlier)
        # One that was judged but is gone or damaged is measured again under its old number.
        if identity.fingerprint == judged_by or store.find(identity):
            challenge = earlier
    return challenge


def eval_view(artifact: Artifact) -> dict[str, Any]:
    return metrics_view(artifact.stats) | answers_view(artifact) | samples_view(artifact)


def metrics_view(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata of `eval_metrics` from its stats; None stands for a figure that is not finite."""
    metrics = stats["metrics"]
    values, bounds = [], []
    for name, roles in metrics.items():
        cells = [
            card.number(roles[role]["value"]) if role in roles else "not measured" for role in ROLES
        ]
        values.append((spaced(name), *cells))
        for role in ROLES:
            if (low := roles.get(role, UNMEASURED).get("low")) is not None:
                bounds.append(
                    (spaced(name), role, card.number(low), card.number(roles[role]["high"]))
                )
    metric = Metric.model_validate(stats["metric"])
    held_out = metrics[f"held_out_{metric.name}"]
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
        | {name: value for name, value in _of_candidate(metrics).items() if value is not None}
        | _confusion(stats)
        | _exam(stats)
    )


def _of_candidate(metrics: Mapping[str, Mapping[str, Figure]]) -> Figure:
    """Metric to the candidate's value; None where it is not finite or was not measured."""
    return {name: roles.get("candidate", UNMEASURED)["value"] for name, roles in metrics.items()}


def _exam(stats: Mapping[str, Any]) -> dict[str, Any]:
    if not (exam := stats.get("exam")):
        return {}
    shares = ([name, *map(card.number, values)] for name, *values in exam_shares(stats))
    conditions = table(["condition", "base", "candidate"], shares)
    return {"exam_result": exam["sentence"], "exam": conditions}


def samples_view(evaluation: Artifact) -> dict[str, Any]:
    """What base and candidate write after the same beginnings, and what a chat's own answer is."""
    samples = read_samples(evaluation)
    pairs = zip(samples.get("base", []), samples.get("candidate", []), strict=False)
    texts = [
        (one["prompt"], one["completion"], other["completion"], *filter(None, [one.get("answer")]))
        for one, other in pairs
    ]
    # Models that have not learnt write dots without end.
    rows = [[_UNBROKEN.sub("\\1…", text) for text in row] for row in texts]
    heads = ["after", "the base model says", "the candidate says", "the text says"]
    return {"samples": table(heads[: max(map(len, rows))], rows)} if rows else {}


def _confusion(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Of a classifier, which classes the candidate takes for which."""
    details = stats.get("details", {}).get("candidate", {})
    if "confusion" not in details:
        return {}
    title, axes = "The candidate on held-out examples", ("predicted class", "true class")
    picture = figures.matrix(title, *axes, details["labels"], details["confusion"])
    return {"confusion_matrix": picture}


def spaced(name: str) -> str:
    """A name that may be broken at its spaces, so that its table fits the page."""
    return name.replace("_", " ")


def figures_are_finite(eval_metrics: Artifact) -> dg.AssetCheckResult:
    """Every figure of the candidate's evaluation is a number."""
    metrics, faults = (eval_metrics.stats[name] for name in ("metrics", "faults"))
    values = _of_candidate(metrics)
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
    settings = pipeline.settings
    # These are the current ones, whose text may be newer than what the checkpoint was trained on.
    shards = pipeline.record.current("tokenized_shards", needed_by="eval_metrics")
    models, weights = registry.open(pipeline), quantized(settings)
    gate, measured = settings.model_version.gate, settings.measured
    if gate.metric == "exam":
        measured = measured.first_round()
    begin = partial(open_challenge, pipeline, models, checkpoint, base_model, weights)

    def measurement_of(challenge: Challenge) -> Measurement:
        return Measurement(
            *(pipeline, checkpoint, base_model, shards, measured),
            incumbent=challenge.incumbent,
            exam=exam,
            question=challenge.question(gate),
        )

    def identity_of(challenge: Challenge) -> Identity:
        measurement = measurement_of(challenge)
        question = measurement.question and measurement.question.model_dump()
        decided = measurement.identity(identity, {"question": question} | challenge.form)
        return decided.extend(libraries=SERVING_LIBRARIES) if weights else decided

    challenge = challenge_to_measure(models, pipeline.store, begin, identity_of)

    def build(draft: Draft) -> None:
        measurement = measurement_of(challenge)
        # The identity needs no mark of this draw: it follows from the candidate, which is an input.
        drawn = measured.drawn_for(challenge.candidate.fingerprint)
        spec = replace(measurement, settings=drawn).spec(draft)
        draft.stats |= training.evaluate(context, spec)
        draft.stats |= measure_as_served(settings, spec, context.log.info)

    return BuildPlan(identity_of(challenge), build)
