"""Whether an evaluation's figures can be judged at all."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llm_assets.gate.settings import GateSettings
from llm_assets.gate.verdict import Outcome, Reason
from recipes.evaluation.metric import GENERAL_TASK, Metric

DOMAIN_TASK = "held_out"
SERVED_TASK = "held_out_served"
"""The documents of `held_out`, as an engine with quantized weights scores them."""

Metrics = Mapping[str, Mapping[str, Mapping[str, float | None]]]


def measured_tasks(metric: Metric) -> tuple[str, ...]:
    """What has to be measured."""
    return (DOMAIN_TASK, GENERAL_TASK) if metric.has_general else (DOMAIN_TASK,)


def find_mismatch(
    scores: pa.Table, evaluation: Mapping[str, Any], candidate: str, incumbent: str | None
) -> list[Reason]:
    """Whether scores, metrics and models belong together; empty where they do."""
    texts = []
    stated = evaluation.get("evaluation_fingerprint")
    of_scores = (scores.schema.metadata or {}).get(b"evaluation_fingerprint", b"").decode()
    if not stated or of_scores != stated:
        texts.append(
            f"Scores and metrics come from different evaluations ({of_scores or 'unnamed'} and "
            f"{stated or 'unnamed'})."
        )
    measured = evaluation.get("models", {})
    for role, expected in (("candidate", candidate), ("incumbent", incumbent)):
        if measured.get(role) != expected:
            texts.append(
                f"The evaluation measured {measured.get(role) or 'no model'} as the {role}, but it "
                f"is {expected or 'no model'} now."
            )
    again = "Materialize `eval_metrics` again."
    return [Reason(outcome=Outcome.OTHER_EVALUATION, text=f"{text} {again}") for text in texts]


def find_unusable(
    scores: pa.Table, evaluation: Mapping[str, Any], settings: GateSettings
) -> list[Reason]:
    """Why nothing can be concluded from these figures; empty where something can."""
    if fault := evaluation.get("faults", {}).get("candidate"):
        return [
            Reason(
                outcome=Outcome.CANDIDATE_UNREADABLE,
                text=f"The candidate could not be measured: {fault} Train it again, with other "
                "settings where its training diverged.",
            )
        ]
    if fault := evaluation.get("faults", {}).get("incumbent"):
        return [
            Reason(
                outcome=Outcome.INCUMBENT_UNREADABLE,
                text=f"The incumbent could not be measured, so nothing shows that the candidate is "
                f"better: {fault} Restore the incumbent's files, or approve by hand.",
            )
        ]
    reasons = []
    models = evaluation.get("models", {})
    roles = [role for role in ("base", "candidate", "incumbent") if role in models]
    for role in {"base", "candidate"} - set(roles):
        reasons.append(_missing(f"The {role} model was not measured."))
    metric = Metric.model_validate(evaluation["metric"])
    scored = [(task, role) for task in measured_tasks(metric) for role in roles]
    if evaluation.get("served_weights"):
        scored += [(SERVED_TASK, "candidate"), (SERVED_TASK, "incumbent")]
    for task, role in scored:
        reasons += _faulty_scores(scores.filter(pc.equal(scores["task"], task)), task, role)
    reasons += _faulty_metrics(evaluation.get("metrics", {}), metric, roles, settings)
    rows = scores.filter(pc.equal(scores["task"], DOMAIN_TASK))
    clusters = pc.count_distinct(rows["cluster"]).as_py()
    if clusters < settings.minimum_documents:
        reasons.append(
            Reason(
                outcome=Outcome.TOO_FEW_DOCUMENTS,
                text=f"Only {clusters} independent held-out documents were measured; "
                f"{settings.minimum_documents} are needed to judge. Raise "
                "`eval_metrics.held_out_tokens`, or give the corpus more text.",
            )
        )
    return reasons


def _faulty_metrics(
    metrics: Metrics, metric: Metric, roles: list[str], settings: GateSettings
) -> list[Reason]:
    named = {f"{task}_{metric.of(task).name}" for task in measured_tasks(metric)}
    needed = named | set(settings.floors)
    reasons = []
    for name in sorted(needed - set(metrics)):
        reasons.append(_missing(f"The metric {name} is missing."))
    for name, by_role in metrics.items():
        for role in roles:
            if role not in by_role:
                reasons.append(_missing(f"The metric {name} of {role} is missing."))
            elif (value := by_role[role].get("value")) is None or not math.isfinite(value):
                reasons.append(
                    Reason(
                        outcome=Outcome.NOT_FINITE,
                        text=f"The metric {name} of {role} is not a finite number.",
                    )
                )
    return reasons


def _faulty_scores(rows: pa.Table, task: str, role: str) -> list[Reason]:
    column = rows[f"score_{role}"] if f"score_{role}" in rows.column_names else None
    if column is None or not len(rows) or column.null_count:
        return [_missing(f"There are {task} documents without a score of {role}.")]
    if not np.isfinite(read_column(rows, f"score_{role}")).all():
        return [_not_finite(rows, task, role)]
    return []


def _not_finite(rows: pa.Table, task: str, role: str) -> Reason:
    bad = ~np.isfinite(read_column(rows, f"score_{role}"))
    first = rows["document"][int(np.argmax(bad))].as_py()
    return Reason(
        outcome=Outcome.NOT_FINITE,
        text=f"{int(bad.sum())} {task} scores of {role} are not finite numbers, the first for "
        f"document {first}: the model is damaged or its training diverged.",
    )


def _missing(text: str) -> Reason:
    return Reason(outcome=Outcome.MISSING, text=text)


def read_column(rows: pa.Table, name: str) -> np.ndarray:
    """One column of the scores as floats, shape (rows,)."""
    return np.asarray(rows[name].to_numpy(), float)
