"""Judges a candidate against the incumbent on paired per-document scores.

It may replace the incumbent when every figure is finite and was measured in this one evaluation, it
is better than chance, its recipe's metric on held-out text is better than the incumbent's (the
bound of the paired difference that speaks against it, at the level of this look) and better by the
smallest effect as measured, what it lost of general English against the base model is within the
tolerance (upper bound at 2.5 %) where its recipe writes text, and no score is under its floor.
Where weights serve quantized, it has to be better on held-out text in that form, against the
incumbent in the same.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llm_assets.gate.evidence import (
    DOMAIN_TASK,
    SERVED_TASK,
    Metrics,
    find_mismatch,
    find_unusable,
    measured_tasks,
    read_column,
)
from llm_assets.gate.settings import CODE_VERSION, GateSettings
from llm_assets.gate.verdict import Comparison, Outcome, Quantization, Reason, Verdict
from recipes.evaluation.metric import GENERAL_TASK, Metric
from recipes.evaluation.settings import Rounds
from recipes.evaluation.statistics.bounds import allowance, estimate, level

NEWEST_TASK = "held_out_newest"
GENERAL_LEVEL = 0.025
CHANCE_SHARE = 0.95
"""Of the bits of a draw at random, from which on a model counts as no better than that."""


def judge(
    scores: pa.Table,
    evaluation: Mapping[str, Any],
    settings: GateSettings,
    *,
    candidate: str,
    incumbent: str | None,
    look: int,
    readable: int,
    procedure: str = "",
) -> Verdict:
    """Decide whether the candidate may replace the incumbent.

    Args:
        scores: `scores.parquet` of the evaluation, one row a document.
        evaluation: `result.json` of the evaluation.
        settings: the thresholds.
        candidate, incumbent: fingerprints of the weights that this is about, so that figures of
            others decide nothing; None where there is no incumbent.
        look: which judgement of the pipeline's life this is, from 1.
        readable: judgements before the candidate's procedure was chosen.
        procedure: what people chose for making and judging the candidate, for the record.

    Returns:
        The verdict with every reason that speaks against the candidate, or the one for it. Where
        there is no incumbent, the candidate is held against the base model.
    """
    comparisons: list[Comparison] = []
    quantization: Quantization | None = None
    against = find_mismatch(scores, evaluation, candidate, incumbent) or find_unusable(
        scores, evaluation, settings
    )
    if not against:
        quantization = _quantization(scores, evaluation)
        comparisons = _compare_all(scores, evaluation, settings, incumbent, look, readable)
        against = _judge_figures(scores, evaluation, comparisons, settings)
    return Verdict(
        weights=candidate,
        against=incumbent,
        promoted=not against,
        reasons=against or [_praise(comparisons[0], incumbent is not None)],
        comparisons=comparisons,
        thresholds=settings,
        gate_code_version=CODE_VERSION,
        look=look,
        procedure=procedure,
        evaluation_fingerprint=evaluation.get("evaluation_fingerprint"),
        quantization=quantization,
    )


def _compare_all(
    scores: pa.Table,
    evaluation: Mapping[str, Any],
    settings: GateSettings,
    incumbent: str | None,
    look: int,
    readable: int,
) -> list[Comparison]:
    """Held-out text first in the form that decides, general English, and what is shown alone.

    That is the newest slice, where there are slices, and held-out text by the weights as they were
    trained where they serve quantized.
    """
    metric = Metric.model_validate(evaluation["metric"])
    rounds = Rounds.model_validate(evaluation["rounds"])
    at = level(settings.lifetime_error, look, rounds)
    allowed = allowance(readable, rounds.share)
    decisive = SERVED_TASK if evaluation.get("served_weights") else DOMAIN_TASK
    reference = "incumbent" if incumbent is not None else "base"
    effect = settings.smallest_effect
    found = [compare(scores, metric, decisive, reference, at, allowed, effect)]
    others = measured_tasks(metric)[1:]
    found += [compare(scores, metric.of(task), task, "base", GENERAL_LEVEL) for task in others]
    if decisive != DOMAIN_TASK:
        found.append(compare(scores, metric, DOMAIN_TASK, reference, at, allowed, effect))
    if pc.any(pc.equal(scores["task"], NEWEST_TASK)).as_py():
        found.append(compare(scores, metric, NEWEST_TASK, reference, at, allowed))
    return found


def compare(
    scores: pa.Table,
    metric: Metric,
    task: str,
    reference: str,
    level: float,
    allowed: float = 0.0,
    smallest_effect: float | None = None,
) -> Comparison:
    """The candidate's metric minus the reference's, with its bounds at a level.

    With a smallest effect it says also which gain would have been found.
    """
    rows = scores.filter(pc.equal(scores["task"], task))
    of = {role: read_column(rows, f"score_{role}") for role in ("candidate", reference)}
    clusters = np.asarray(rows["cluster"].to_pylist())
    # The bounds are made for losses: what is better when higher is one with its sign turned.
    sign = -1 if metric.higher_is_better else 1
    losses = sign * (of["candidate"] - of[reference])
    found = estimate(losses, read_column(rows, "size"), clusters, level, allowed)
    low, high = sorted((sign * found.low, sign * found.high))
    bounded = math.isfinite(found.high)
    return Comparison(
        task=task,
        reference=reference,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        difference=sign * found.difference,
        level=level,
        allowed=allowed,
        low=low if bounded else None,
        high=high if bounded else None,
        detectable=None if smallest_effect is None else found.detectable(smallest_effect),
        documents=len(rows),
        clusters=found.clusters,
    )


def _judge_figures(
    scores: pa.Table,
    evaluation: Mapping[str, Any],
    comparisons: list[Comparison],
    settings: GateSettings,
) -> list[Reason]:
    """Every reason that speaks against the candidate."""
    in_bits = Metric.model_validate(evaluation["metric"]).is_bits
    return [
        *(_judge_chance(scores, evaluation, comparisons[0].task) if in_bits else []),
        *_judge_decisive(comparisons, settings),
        *_judge_general(comparisons, settings),
        *_judge_floors(evaluation["metrics"], settings),
    ]


def _judge_chance(scores: pa.Table, evaluation: Mapping[str, Any], task: str) -> list[Reason]:
    """A model that predicts hardly better than a draw from the vocabulary has learnt nothing."""
    rows = scores.filter(pc.equal(scores["task"], task))
    predicted = float((read_column(rows, "tokens") - 1).sum())
    chance = math.log2(evaluation["vocab_size"])
    bits = float(read_column(rows, "score_candidate").sum()) / predicted
    if bits < CHANCE_SHARE * chance:
        return []
    text = (
        f"The candidate needs {bits:.2f} bits for a token of held-out text, where a draw at random "
        f"takes {chance:.2f}: it is no better than chance. Its training diverged, or taught it "
        f"nothing{', or its quantized weights hold nothing of it' * (task == SERVED_TASK)}."
    )
    return [Reason(outcome=Outcome.CHANCE, text=text)]


def _quantization(scores: pa.Table, evaluation: Mapping[str, Any]) -> Quantization | None:
    """What the candidate loses by its format; None where weights serve as they were trained."""
    if not evaluation.get("served_weights"):
        return None
    bits = {}
    for task in (DOMAIN_TASK, SERVED_TASK):
        rows = scores.filter(pc.equal(scores["task"], task))
        needed = read_column(rows, "score_candidate").sum()
        bits[task] = float(needed / read_column(rows, "size").sum())
    return Quantization(
        weights=evaluation["served_weights"],
        evaluated=bits[DOMAIN_TASK],
        served=bits[SERVED_TASK],
    )


def _judge_decisive(comparisons: list[Comparison], settings: GateSettings) -> list[Reason]:
    """Held-out text; where the format alone stands against the candidate, the reason says so."""
    against = _judge_domain(comparisons[0], settings)
    exact = next(found for found in comparisons if found.task == DOMAIN_TASK)
    if not against or _judge_domain(exact, settings):
        return against
    text = f"{against[0].text} With its weights as they were trained it would have been better."
    return [Reason(outcome=Outcome.QUANTIZATION, text=text)]


def _judge_domain(found: Comparison, settings: GateSettings) -> list[Reason]:
    is_better = found.surest_gain is not None and found.surest_gain > 0
    if is_better and found.gain >= settings.smallest_effect:
        return []
    if found.difference == 0 and found.low == 0:
        text = f"Candidate and {found.reference} score the same on held-out text{_form(found)}."
        return [Reason(outcome=Outcome.TIE, text=text)]
    missed = "the upper bound is not below zero"
    if found.higher_is_better:
        missed = "the lower bound is not above zero"
    if is_better:
        missed = f"the smallest effect that matters is {settings.smallest_effect:g}"
    text = f"On held-out text{_form(found)} the candidate's {_figures(found)} against the "
    text += f"{found.reference}'s: "
    power = f"{missed}. A gain of {found.detectable:.4f} would have been found with 80 %."
    return [Reason(outcome=Outcome.NOT_BETTER, text=text + power)]


def _judge_general(comparisons: list[Comparison], settings: GateSettings) -> list[Reason]:
    return [
        Reason(
            outcome=Outcome.GENERAL_REGRESSION,
            text=f"On general English the candidate's {_figures(found)} against the base model's: "
            f"the upper bound is above the tolerance of {settings.general_tolerance:g}.",
        )
        for found in comparisons
        if found.task == GENERAL_TASK
        and (found.surest_gain is None or -found.surest_gain > settings.general_tolerance)
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
        + f"On held-out text{_form(found)} the candidate's {_figures(found)} against the "
        f"{found.reference}'s.",
    )


def _form(found: Comparison) -> str:
    return " (as served)" if found.task == SERVED_TASK else ""


def _figures(found: Comparison) -> str:
    sure = 100 * (1 - 2 * found.level)
    bounds = [f"{b:+.4f}" if b is not None else "unbounded" for b in (found.low, found.high)]
    return (
        f"{found.unit} differ by {found.difference:+.4f} ({sure:.6g} % interval {bounds[0]} to "
        f"{bounds[1]}, {found.clusters} independent documents)"
    )
