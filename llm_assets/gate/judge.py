"""Judges a candidate against the incumbent on paired per-document scores."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llm_assets.gate.bounds import estimate, spend
from llm_assets.gate.settings import CODE_VERSION, GateSettings
from llm_assets.gate.verdict import Comparison, Outcome, Reason, Verdict
from recipes.evaluation.metric import Metric

DOMAIN_TASK = "held_out"
GENERAL_TASK = "general"
NEWEST_TASK = "held_out_newest"
GENERAL_LEVEL = 0.025
CHANCE_SHARE = 0.95
"""Of the bits of a draw at random, from which on a model counts as no better than that."""

Metrics = Mapping[str, Mapping[str, Mapping[str, float | None]]]


def judge(
    scores: pa.Table,
    evaluation: Mapping[str, Any],
    settings: GateSettings,
    *,
    candidate: str,
    incumbent: str | None,
    look: int,
) -> Verdict:
    """Decide whether the candidate may replace the incumbent.

    It may when every figure is finite and was measured in this one evaluation, it is better than
    chance, its recipe's metric on held-out text is better than the incumbent's (the bound of the
    paired difference that speaks against it, at the level of this look) and better by the smallest
    effect as measured, what it lost of general English against the base model is within the
    tolerance (upper bound at 2.5 %) where its recipe writes text, and no score is under its floor.

    Args:
        scores: `scores.parquet` of the evaluation, one row a document.
        evaluation: `result.json` of the evaluation.
        settings: the thresholds.
        candidate, incumbent: fingerprints of the weights that this is about, so that figures of
            others decide nothing; None where there is no incumbent.
        look: which judgement of the pipeline's life this is, from 1.

    Returns:
        The verdict with every reason that speaks against the candidate, or the one for it. Where
        there is no incumbent, the candidate is held against the base model.
    """
    verdict = Verdict(
        weights=candidate,
        against=incumbent,
        promoted=False,
        reasons=[],
        comparisons=[],
        thresholds=settings,
        gate_code_version=CODE_VERSION,
        look=look,
        evaluation_fingerprint=evaluation.get("evaluation_fingerprint"),
    )
    faults = _other_evaluation(scores, evaluation, candidate, incumbent) or _unusable(
        scores, evaluation, settings
    )
    if faults:
        return verdict.model_copy(update={"reasons": faults})
    has_incumbent = incumbent is not None
    reference = "incumbent" if has_incumbent else "base"
    level = spend(settings.lifetime_error, look)
    metric = Metric.model_validate(evaluation["metric"])
    domain = compare(scores, metric, DOMAIN_TASK, reference, level, settings.smallest_effect)
    general = [compare(scores, metric, task, "base", GENERAL_LEVEL) for task in _tasks(metric)[1:]]
    against = [
        *(_judge_chance(scores, evaluation) if metric.is_bits else []),
        *_judge_domain(domain, settings),
        *(reason for found in general for reason in _judge_general(found, settings)),
        *_judge_floors(evaluation["metrics"], settings),
    ]
    return verdict.model_copy(
        update={
            "promoted": not against,
            "reasons": against or [_praise(domain, has_incumbent)],
            "comparisons": [domain, *general, *_newest_slice(scores, metric, reference, level)],
        }
    )


def _tasks(metric: Metric) -> tuple[str, ...]:
    """What has to be measured."""
    return (DOMAIN_TASK, GENERAL_TASK) if metric.has_general else (DOMAIN_TASK,)


def compare(
    scores: pa.Table,
    metric: Metric,
    task: str,
    reference: str,
    level: float,
    smallest_effect: float | None = None,
) -> Comparison:
    """The candidate's metric minus the reference's, with its bounds at a level.

    With a smallest effect it says also which gain would have been found.
    """
    rows = scores.filter(pc.equal(scores["task"], task))
    of = {role: _column(rows, f"score_{role}") for role in ("candidate", reference)}
    clusters = np.asarray(rows["cluster"].to_pylist())
    # The bounds are made for losses: what is better when higher is one with its sign turned.
    sign = -1 if metric.higher_is_better else 1
    losses = sign * (of["candidate"] - of[reference])
    found = estimate(losses, _column(rows, "size"), clusters, level)
    low, high = sorted((sign * found.low, sign * found.high))
    bounded = math.isfinite(found.high)
    return Comparison(
        task=task,
        reference=reference,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        difference=sign * found.difference,
        level=level,
        low=low if bounded else None,
        high=high if bounded else None,
        detectable=None if smallest_effect is None else found.detectable(smallest_effect),
        documents=len(rows),
        clusters=found.clusters,
    )


def _newest_slice(
    scores: pa.Table, metric: Metric, reference: str, level: float
) -> list[Comparison]:
    """What the held-out documents that arrived last say by themselves; shown, not decided on."""
    if not pc.any(pc.equal(scores["task"], NEWEST_TASK)).as_py():
        return []
    return [compare(scores, metric, NEWEST_TASK, reference, level)]


def _other_evaluation(
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


def _unusable(
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
    for task in _tasks(metric):
        rows = scores.filter(pc.equal(scores["task"], task))
        for role in roles:
            column = rows[f"score_{role}"] if f"score_{role}" in rows.column_names else None
            if column is None or not len(rows) or column.null_count:
                reasons.append(_missing(f"There are {task} documents without a score of {role}."))
            elif not np.isfinite(_column(rows, f"score_{role}")).all():
                reasons.append(_not_finite(rows, task, role))
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
    needed = {f"{task}_{metric.name}" for task in _tasks(metric)} | set(settings.floors)
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


def _not_finite(rows: pa.Table, task: str, role: str) -> Reason:
    bad = ~np.isfinite(_column(rows, f"score_{role}"))
    first = rows["document"][int(np.argmax(bad))].as_py()
    return Reason(
        outcome=Outcome.NOT_FINITE,
        text=f"{int(bad.sum())} {task} scores of {role} are not finite numbers, the first for "
        f"document {first}: the model is damaged or its training diverged.",
    )


def _judge_chance(scores: pa.Table, evaluation: Mapping[str, Any]) -> list[Reason]:
    """A model that predicts hardly better than a draw from the vocabulary has learnt nothing."""
    rows = scores.filter(pc.equal(scores["task"], DOMAIN_TASK))
    predicted = float((_column(rows, "tokens") - 1).sum())
    chance = math.log2(evaluation["vocab_size"])
    bits = float(_column(rows, "score_candidate").sum()) / predicted
    if bits < CHANCE_SHARE * chance:
        return []
    return [
        Reason(
            outcome=Outcome.CHANCE,
            text=f"The candidate needs {bits:.2f} bits for a token of held-out text, where a draw "
            f"at random takes {chance:.2f}: it is no better than chance. Its training diverged, "
            "or taught it nothing.",
        )
    ]


def _judge_domain(found: Comparison, settings: GateSettings) -> list[Reason]:
    is_better = found.surest_gain is not None and found.surest_gain > 0
    if is_better and found.gain >= settings.smallest_effect:
        return []
    if found.difference == 0 and found.low == 0:
        text = f"Candidate and {found.reference} score the same on held-out text."
        return [Reason(outcome=Outcome.TIE, text=text)]
    missed = "the upper bound is not below zero"
    if found.higher_is_better:
        missed = "the lower bound is not above zero"
    if is_better:
        missed = f"the smallest effect that matters is {settings.smallest_effect:g}"
    text = f"On held-out text the candidate's {_figures(found)} against the {found.reference}'s: "
    power = f"{missed}. A gain of {found.detectable:.4f} would have been found with 80 %."
    return [Reason(outcome=Outcome.NOT_BETTER, text=text + power)]


def _judge_general(found: Comparison, settings: GateSettings) -> list[Reason]:
    if found.surest_gain is not None and -found.surest_gain <= settings.general_tolerance:
        return []
    return [
        Reason(
            outcome=Outcome.GENERAL_REGRESSION,
            text=f"On general English the candidate's {_figures(found)} against the base model's: "
            f"the upper bound is above the tolerance of {settings.general_tolerance:g}.",
        )
    ]


def _judge_floors(metrics: Metrics, settings: GateSettings) -> list[Reason]:
    reasons = []
    for name, floor in settings.floors.items():
        value = metrics[name]["candidate"]["value"]
        if value is None or value < floor:
            reasons.append(
                Reason(
                    outcome=Outcome.BELOW_FLOOR,
                    text=f"The candidate's {name} of {value:.4g} is under its floor of {floor:g}.",
                )
            )
    return reasons


def _praise(found: Comparison, has_incumbent: bool) -> Reason:
    return Reason(
        outcome=Outcome.BETTER if has_incumbent else Outcome.NO_INCUMBENT,
        text=("" if has_incumbent else "There is no incumbent yet. ")
        + f"On held-out text the candidate's {_figures(found)} against the {found.reference}'s.",
    )


def _figures(found: Comparison) -> str:
    sure = 100 * (1 - 2 * found.level)
    bounds = [f"{b:+.4f}" if b is not None else "unbounded" for b in (found.low, found.high)]
    return (
        f"{found.unit} differ by {found.difference:+.4f} ({sure:.6g} % interval {bounds[0]} to "
        f"{bounds[1]}, {found.clusters} independent documents)"
    )


def _missing(text: str) -> Reason:
    return Reason(outcome=Outcome.MISSING, text=text)


def _column(rows: pa.Table, name: str) -> np.ndarray:
    return np.asarray(rows[name].to_numpy(), float)
