"""A candidate and the model that it is held against, and how the registry records both."""

from dataclasses import dataclass
from typing import Any

import pyarrow.parquet as pq

from artifacts.store.store import Artifact
from llm_assets.gate.judge import judge, with_answers
from llm_assets.gate.verdict import GateSettings, Verdict
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.base import Registry
from llm_assets.registry.card import dollars_of, lineage, procedure, weights_fingerprint
from llm_assets.registry.state import ModelEntry, ModelVersion
from recipes.evaluation.settings import SCORES_NAME, TASK_SCORES_NAME, GateQuestion, ModelSource
from recipes.spec import MODEL_FOLDER
from serving.settings import Weights


@dataclass(frozen=True)
class Challenge:
    """A candidate and the model that it is held against."""

    candidate: ModelSource
    incumbent: ModelVersion
    look: int
    """Which judgement of the pipeline's life this is."""
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
        chosen = gate.model_dump(include={"lifetime_error", "smallest_effect"})
        return GateQuestion(look=self.look, readable=self.readable, **chosen)


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
        measured: fingerprint of the evaluation, once there is one.
    """
    models.register_base(base_entry(base))
    state, source, settings = models.state(), model_source(candidate), pipeline.settings
    incumbent = state.incumbent_of(source.fingerprint)
    look = state.look_of(source.fingerprint, incumbent.weights, measured)
    form: dict[str, str] = {"served_weights": weights} if weights else {}
    judged_by = {
        "eval_metrics": settings.eval_metrics.content(),
        "gate": settings.model_version.content(),
    } | form
    if settings.exam and settings.model_version.gate.metric == "exam":
        judged_by["exam"] = settings.exam.model_dump(mode="json")
    chosen = procedure(candidate, judged_by)
    return Challenge(source, incumbent, look, state.readable_before(look, chosen), chosen, form)


def base_entry(base: Artifact) -> ModelEntry:
    """The `base_model` artifact as the registry records it."""
    return ModelEntry(
        weights=model_source(base).fingerprint,
        model_fingerprint=base.fingerprint,
        model_url=base.url,
        license=base.stats["license"],
        lineage=lineage(base),
    )


def candidate_entry(candidate: Artifact, evaluation: Artifact, license: str) -> ModelEntry:
    """A `checkpoint` artifact as the registry records it, with what was measured of it."""
    source = model_source(candidate)
    return ModelEntry(
        weights=source.fingerprint,
        model_fingerprint=candidate.fingerprint,
        model_url=source.path,
        license=license,
        lineage=lineage(evaluation),
        coverage=candidate.stats["coverage"],
        dollars=dollars_of(evaluation),
        evaluation=evaluation.stats,
    )


def model_source(artifact: Artifact) -> ModelSource:
    """The Hugging Face folder of a `checkpoint` or `base_model`, known by its weights."""
    folder = f"{MODEL_FOLDER}/" if artifact.manifest.kind == "checkpoint" else ""
    return ModelSource(
        path=f"{artifact.url}/{folder}".rstrip("/"),
        fingerprint=weights_fingerprint(artifact, folder),
    )
