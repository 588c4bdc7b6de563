"""Judges a candidate against the incumbent on paired per-document scores.

It may replace the incumbent when every figure is finite and was measured in this one evaluation, it
is better than chance, its recipe's metric on held-out text, or its answers to the exam where the
settings say so, are better than the incumbent's (the bound of the paired difference that speaks
against it, at the level of this look) and better by the smallest effect as measured, what it lost
of general English against the base model is within the tolerance (upper bound at 2.5%) where its
recipe writes text, and no score is under its floor. Where weights serve quantized, it has to be
better on held-out text in that form, against the incumbent in the same. First comes whether the
figures can be judged at all.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from llm_assets.gate.verdict import (
    CODE_VERSION,
    Comparison,
    GateSettings,
    Outcome,
    Quantization,
    Reason,
    Verdict,
)
from recipes.evaluation.exam import CLOSED_BOOK, METRIC
from recipes.evaluation.settings import GENERAL_TASK, Metric, Rounds
from recipes.evaluation.statistics import allowance, estimate, level

DOMAIN_TASK = "held_out"
SERVED_TASK = "held_out_served"
"""The documents of `held_out`, as an engine with quantized weights scores them."""

ANSWERS = Metric(name=METRIC, unit="right answers", higher_is_better=True)
ASKED_AT_ONCE = Rounds(measured=1, planned=1, share=1.0)
"""How an exam is measured: whoever has read the scores of a candidate knows all of it."""

Metrics = Mapping[str, Mapping[str, Mapping[str, float | None]]]
NEWEST_TASK = "held_out_newest"
GENERAL_LEVEL = 0.025
"""Of each end of a 95% interval, as `general_tolerance` promises; no lifetime is spent on it, since
it can only keep a candidate from being promoted."""
CHANCE_SHARE = 0.95
"""Of the bits of a draw at random, from which on a model counts as no better than that."""


def measured_tasks(metric: Metric) -> tuple[str, ...]:
    """What has to be measured."""
    return (DOMAIN_TASK, GENERAL_TASK) if metric.has_general else (DOMAIN_TASK,)


def with_answers(scores: pa.Table, answers: pa.Table) -> pa.Table:
    """The scores of documents, and each question of the exam, closed book, as one more.

    A fact counts once, in however many forms it is asked about.

    Args:
        answers: `task_scores.parquet` of the same evaluation.
    """
    asked = pc.and_(pc.equal(answers["task"], CLOSED_BOOK), pc.equal(answers["metric"], METRIC))
    rows = answers.filter(asked).rename_columns({"sample": "document"})
    known = set(scores.column_names)
    rows = rows.select([name for name in rows.column_names if name in known]).append_column(
        "size", pa.array(np.ones(len(rows)))
    )
    metadata = scores.schema.metadata
    both = pa.concat_tables([scores, once_a_cluster(rows)], promote_options="default")
    return both.replace_schema_metadata(metadata)


def once_a_cluster(rows: pa.Table) -> pa.Table:
    """Scores and sizes divided by the rows of their cluster, which then counts once as a whole."""
    names = rows["cluster"].to_pylist()
    _, groups, counts = np.unique(names, return_inverse=True, return_counts=True)
    share = pa.array(1.0 / counts[groups])
    for place, name in enumerate(rows.column_names):
        if name == "size" or name.startswith("score_"):
            rows = rows.set_column(place, name, pc.multiply(rows[name], share))
    return rows


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
                f"The evaluation measured {measured.get(role) or 'no model'} as the {role}, which "
                f"is {expected or 'no model'} now."
            )
    again = "Materialize `eval_metrics` again."
    return [Outcome.OTHER_EVALUATION.because(f"{text} {again}") for text in texts]


def find_unusable(
    scores: pa.Table, evaluation: Mapping[str, Any], settings: GateSettings
) -> list[Reason]:
    """Why nothing can be concluded from these figures; empty where something can."""
    faults = evaluation.get("faults", {})
    if fault := faults.get("candidate"):
        text = f"The candidate could not be measured: {fault} Train it again, with other settings "
        return [Outcome.CANDIDATE_UNREADABLE.because(f"{text}if its training diverged.")]
    if fault := faults.get("incumbent"):
        text = "The incumbent could not be measured, so nothing shows that the candidate is better:"
        remedy = "Restore the incumbent's files, or approve by hand."
        return [Outcome.INCUMBENT_UNREADABLE.because(f"{text} {fault} {remedy}")]
    models = evaluation.get("models", {})
    roles = [role for role in ("base", "candidate", "incumbent") if role in models]
    absent = [role for role in ("base", "candidate") if role not in models]
    reasons = [Outcome.MISSING.because(f"The {role} model was not measured.") for role in absent]
    metric = Metric.model_validate(evaluation["metric"])
    scored = [(task, role) for task in measured_tasks(metric) for role in roles]
    if evaluation.get("served_weights"):
        scored += [(SERVED_TASK, "candidate"), (SERVED_TASK, "incumbent")]
    if settings.metric == "exam":
        scored += [(CLOSED_BOOK, role) for role in roles]
    for task, role in scored:
        reasons += _faulty_scores(rows_of(scores, task), task, role)
    reasons += _faulty_metrics(evaluation.get("metrics", {}), metric, roles, settings)
    return reasons + _too_few(scores, settings)


def _too_few(scores: pa.Table, settings: GateSettings) -> list[Reason]:
    exam_decides = settings.metric == "exam"
    rows = rows_of(scores, CLOSED_BOOK if exam_decides else DOMAIN_TASK)
    clusters = pc.count_distinct(rows["cluster"]).as_py()
    if clusters >= settings.minimum_documents:
        return []
    needed = f"{settings.minimum_documents} are needed to judge"
    text = (
        f"The exam asks about only {clusters} facts; {needed}. Add facts to the file that "
        "`exam.facts` names."
        if exam_decides
        else f"Only {clusters} independent held-out documents were measured; {needed}. Add "
        "documents: some of the new ones are held out, too. If more are held out than were "
        "measured, raise `eval_metrics.held_out_tokens`. Or decide yourself: "
        "`llm-assets approve VERSION --reason REASON`."
    )
    return [Outcome.TOO_FEW_DOCUMENTS.because(text)]


def _faulty_metrics(
    metrics: Metrics, metric: Metric, roles: list[str], settings: GateSettings
) -> list[Reason]:
    named = {f"{task}_{metric.of(task).name}" for task in measured_tasks(metric)}
    absent = sorted((named | set(settings.floors)) - set(metrics))
    reasons = [Outcome.MISSING.because(f"The metric {name} is missing.") for name in absent]
    for name, by_role in metrics.items():
        for role in roles:
            told = f"The metric {name} of the {role} model is"
            if role not in by_role:
                reasons.append(Outcome.MISSING.because(f"{told} missing."))
            elif (value := by_role[role].get("value")) is None or not math.isfinite(value):
                reasons.append(Outcome.NOT_FINITE.because(f"{told} not a finite number."))
    return reasons


def _faulty_scores(rows: pa.Table, task: str, role: str) -> list[Reason]:
    column = rows[f"score_{role}"] if f"score_{role}" in rows.column_names else None
    if column is None or not len(rows) or column.null_count:
        return [Outcome.MISSING.because(f"Scores of the {role} model for {task} are missing.")]
    bad = ~np.isfinite(read_column(rows, f"score_{role}"))
    if not bad.any():
        return []
    first = rows["document"][int(np.argmax(bad))].as_py()
    text = (
        f"{int(bad.sum())} {task} scores of the {role} model are not finite numbers, the first for "
        f"{first}: the model is damaged or its training diverged."
    )
    return [Outcome.NOT_FINITE.because(text)]


def rows_of(scores: pa.Table, task: str) -> pa.Table:
    """The scores of one task."""
    return scores.filter(pc.equal(scores["task"], task))


def read_column(rows: pa.Table, name: str) -> np.ndarray:
    """One column of the scores as floats, shape (rows,)."""
    return np.asarray(rows[name].to_numpy(), float)


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
        scores: `scores.parquet` of the evaluation, one row a document; `with_answers` where the
            exam decides.
        evaluation: `result.json` of the evaluation.
        settings: the thresholds.
        candidate, incumbent: fingerprints of the weights that this is about, so that figures of
            others decide nothing; None where there is no incumbent.
        look: 1, and one more for each comparison of the pipeline's life that could have promoted
            and did not.
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
        against = [
            *_judge_chance(scores, evaluation, comparisons, settings),
            *_judge_decisive(comparisons, settings),
            *_judge_general(comparisons, settings),
            *_judge_floors(evaluation["metrics"], settings),
        ]
    return Verdict(
        weights=candidate,
        against=incumbent,
        promoted=not against,
        reasons=against or [praise(comparisons[0], incumbent is not None)],
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
    """What decides, general English, and what is shown alone.

    Held-out text decides, in the form that serves, or the exam. Shown alone are the newest slice,
    where there are slices, and held-out text by the weights as they were trained where they serve
    quantized, or where the exam decides.
    """
    metric = Metric.model_validate(evaluation["metric"])
    exam_decides = settings.metric == "exam"
    rounds = ASKED_AT_ONCE if exam_decides else Rounds.model_validate(evaluation["rounds"])
    at = level(settings.lifetime_error, look, rounds)
    allowed = allowance(readable, rounds.share)
    decisive = SERVED_TASK if evaluation.get("served_weights") else DOMAIN_TASK
    by = metric
    if exam_decides:
        decisive, by = CLOSED_BOOK, ANSWERS
    reference = "incumbent" if incumbent is not None else "base"
    effect = settings.smallest_effect
    found = [compare(scores, by, decisive, reference, at, allowed, effect)]
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
    rows = rows_of(scores, task)
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


def _judge_chance(
    scores: pa.Table,
    evaluation: Mapping[str, Any],
    comparisons: list[Comparison],
    settings: GateSettings,
) -> list[Reason]:
    """A model that predicts hardly better than a draw from the vocabulary has learnt nothing."""
    if not Metric.model_validate(evaluation["metric"]).is_bits:
        return []
    task = DOMAIN_TASK if settings.metric == "exam" else comparisons[0].task
    rows = rows_of(scores, task)
    predicted = float((read_column(rows, "tokens") - 1).sum())
    chance = math.log2(evaluation["vocab_size"])
    bits = float(read_column(rows, "score_candidate").sum()) / predicted
    if bits < CHANCE_SHARE * chance:
        return []
    text = (
        f"The candidate needs {bits:.2f} bits per token of held-out text, and random guessing "
        f"{chance:.2f}: it is hardly better than chance, or worse. Its training diverged or taught "
        f"it nothing{', or quantization destroyed what it learned' * (task == SERVED_TASK)}."
    )
    return [Outcome.CHANCE.because(text)]


def _quantization(scores: pa.Table, evaluation: Mapping[str, Any]) -> Quantization | None:
    """What the candidate loses by its format; None where weights serve as they were trained."""
    if not evaluation.get("served_weights"):
        return None
    bits = {}
    for task in (DOMAIN_TASK, SERVED_TASK):
        rows = rows_of(scores, task)
        needed = read_column(rows, "score_candidate").sum()
        bits[task] = float(needed / read_column(rows, "size").sum())
    return Quantization(
        weights=evaluation["served_weights"],
        evaluated=bits[DOMAIN_TASK],
        served=bits[SERVED_TASK],
    )


def _judge_decisive(comparisons: list[Comparison], settings: GateSettings) -> list[Reason]:
    """What decides; where the format alone stands against the candidate, the reason says so."""
    against = judge_gain(comparisons[0], settings)
    exact = next(found for found in comparisons if found.task == DOMAIN_TASK)
    if not against or comparisons[0].task != SERVED_TASK or judge_gain(exact, settings):
        return against
    text = f"{against[0].text} With its weights as they were trained it would have been better."
    return [Outcome.QUANTIZATION.because(text)]


def judge_gain(found: Comparison, settings: GateSettings) -> list[Reason]:
    """Why a comparison is no gain that matters; empty where it is one."""
    is_better = found.surest_gain is not None and found.surest_gain > 0
    if is_better and found.gain >= settings.smallest_effect:
        return []
    if found.difference == 0 and found.low == 0:
        text = f"Candidate and {found.reference} score the same on {_text(found)}."
        return [Outcome.TIE.because(text)]
    missed = "the upper bound is not below zero"
    if found.higher_is_better:
        missed = "the lower bound is not above zero"
    if is_better:
        missed = f"the smallest effect that matters is {settings.smallest_effect:g}"
    power = f"A gain of {found.detectable:.4f} would have been detected with 80% power."
    if documents := found.documents_to_decide(settings.smallest_effect):
        power += (
            f" If the true gain is the measured one, about {documents:,} {_counted(found)} are "
            "needed."
        )
    return [Outcome.NOT_BETTER.because(f"{_measured(found)}: {missed}. {power}")]


def _judge_general(comparisons: list[Comparison], settings: GateSettings) -> list[Reason]:
    return [
        Outcome.GENERAL_REGRESSION.because(
            f"On general English the candidate's {_figures(found)} from the base model's: "
            f"the upper bound is above the tolerance of {settings.general_tolerance:g}."
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
            text = f"The candidate's {name} of {value:.4g} is under its floor of {floor:g}."
            reasons.append(Outcome.BELOW_FLOOR.because(text))
    return reasons


def praise(found: Comparison, has_incumbent: bool) -> Reason:
    """What speaks for a candidate."""
    if has_incumbent:
        return Outcome.BETTER.because(f"{_measured(found)}.")
    return Outcome.NO_INCUMBENT.because(f"There is no incumbent yet. {_measured(found)}.")


def _measured(found: Comparison) -> str:
    return f"On {_text(found)} the candidate's {_figures(found)} from the {found.reference}'s"


def _text(found: Comparison) -> str:
    names = {
        DOMAIN_TASK: "held-out text",
        SERVED_TASK: "held-out text (as served)",
        CLOSED_BOOK: "the exam, closed book,",
    }
    return names.get(found.task, found.task)


def _figures(found: Comparison) -> str:
    sure = 100 * (1 - 2 * found.level)
    bounds = [f"{b:+.4f}" if b is not None else "unbounded" for b in (found.low, found.high)]
    return (
        f"{found.unit} differ by {found.difference:+.4f} ({sure:.6g}% interval {bounds[0]} to "
        f"{bounds[1]}, {found.clusters} {_counted(found)})"
    )


def _counted(found: Comparison) -> str:
    """What the clusters of a comparison are; other tasks than the graph's are lm-eval's."""
    if found.task == CLOSED_BOOK:
        return "facts"
    of_documents = (DOMAIN_TASK, SERVED_TASK, GENERAL_TASK, NEWEST_TASK)
    return "independent documents" if found.task in of_documents else "independent questions"
