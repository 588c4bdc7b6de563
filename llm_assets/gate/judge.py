"""Judges a candidate against the incumbent on paired per-document scores.

First comes whether the figures can be judged at all: all of them are there and finite, were
measured in this one evaluation, and come from enough independent documents or facts. The candidate
may then replace the incumbent if

- it is better than chance;
- its recipe's metric on held-out text, or its answers to the exam where the settings say so, are
  better than the incumbent's: by the bound of the paired difference that speaks against it, at the
  level of this look, and as measured by at least the smallest effect;
- what it lost of general English against the base model is within the tolerance (upper bound at
  2.5%), where its recipe writes text;
- no score is under its floor.

Where weights serve quantized, it has to be better on held-out text in that form, against the
incumbent in the same.
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
"""The documents of `held_out`, scored by an engine with quantized weights."""

ANSWERS = Metric(name=METRIC, unit="right answers", higher_is_better=True)
ASKED_AT_ONCE = Rounds(measured=1, planned=1, share=1.0)
"""An exam is measured in one round: whoever has read a candidate's scores knows all of it."""

Metrics = Mapping[str, Mapping[str, Mapping[str, float | None]]]
NEWEST_TASK = "held_out_newest"
GENERAL_LEVEL = 0.025
"""Error at each end of a 95% interval, as `general_tolerance` promises. Nothing is taken from
`lifetime_error`, since this check can only prevent a promotion."""
CHANCE_SHARE = 0.95
"""Share of the bits of random guessing from which on a model counts as no better than that."""


def measured_tasks(metric: Metric) -> tuple[str, ...]:
    return (DOMAIN_TASK, GENERAL_TASK) if metric.has_general else (DOMAIN_TASK,)


def with_answers(scores: pa.Table, answers: pa.Table) -> pa.Table:
    """The scores of documents, with each closed-book question of the exam as another row.

    A fact counts once, in however many forms it is asked about.

    Args:
        answers: `task_scores.parquet` of the same evaluation.
    """
    is_closed_book = pc.and_(
        pc.equal(answers["task"], CLOSED_BOOK), pc.equal(answers["metric"], METRIC)
    )
    rows = answers.filter(is_closed_book).rename_columns({"sample": "document"})
    columns = set(scores.column_names)
    rows = rows.select([name for name in rows.column_names if name in columns]).append_column(
        "size", pa.array(np.ones(len(rows)))
    )
    # It has the evaluation's fingerprint, which `find_mismatch` compares.
    metadata = scores.schema.metadata
    # Answers lack what only documents have, such as their tokens.
    table = pa.concat_tables([scores, once_a_cluster(rows)], promote_options="default")
    return table.replace_schema_metadata(metadata)


def once_a_cluster(rows: pa.Table) -> pa.Table:
    """Scores and sizes divided by the number of rows in their cluster, so that it counts once."""
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
    of_metrics = evaluation.get("evaluation_fingerprint")
    of_scores = (scores.schema.metadata or {}).get(b"evaluation_fingerprint", b"").decode()
    if not of_metrics or of_scores != of_metrics:
        texts.append(
            f"Scores and metrics come from different evaluations ({of_scores or 'unnamed'} and "
            f"{of_metrics or 'unnamed'})."
        )
    models = evaluation.get("models", {})
    for role, expected in (("candidate", candidate), ("incumbent", incumbent)):
        if models.get(role) != expected:
            texts.append(
                f"The evaluation measured {models.get(role) or 'no model'} as the {role}, which "
                f"is {expected or 'no model'} now."
            )
    advice = "Materialize `eval_metrics` again."
    return [Outcome.OTHER_EVALUATION.because(f"{text} {advice}") for text in texts]


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
    # Near-copies are one draw of the text, and all forms of a question one fact.
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
    required = {f"{task}_{metric.of(task).name}" for task in measured_tasks(metric)}
    absent = sorted((required | set(settings.floors)) - set(metrics))
    reasons = [Outcome.MISSING.because(f"The metric {name} is missing.") for name in absent]
    for name, by_role in metrics.items():
        for role in roles:
            subject = f"The metric {name} of the {role} model is"
            if role not in by_role:
                reasons.append(Outcome.MISSING.because(f"{subject} missing."))
            elif (value := by_role[role].get("value")) is None or not math.isfinite(value):
                reasons.append(Outcome.NOT_FINITE.because(f"{subject} not a finite number."))
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
    # Figures of another evaluation or model are not examined any further.
    reasons = find_mismatch(scores, evaluation, candidate, incumbent) or find_unusable(
        scores, evaluation, settings
    )
    if not reasons:
        quantization = _quantization(scores, evaluation)
        comparisons = _compare_all(scores, evaluation, settings, incumbent, look, readable)
        reasons = [
            *_judge_chance(scores, evaluation, comparisons, settings),
            *_judge_decisive(comparisons, settings),
            *_judge_general(comparisons, settings),
            *_judge_floors(evaluation["metrics"], settings),
        ]
    return Verdict(
        weights=candidate,
        against=incumbent,
        promoted=not reasons,
        reasons=reasons or [praise(comparisons[0], incumbent is not None)],
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
    # All looks of a pipeline's life share one error, so retries do not make it more likely that a
    # model is promoted by chance.
    alpha = level(settings.lifetime_error, look, rounds)
    # Whoever has read the scores of earlier looks may have chosen this candidate by them.
    allowed = allowance(readable, rounds.share)
    decisive = SERVED_TASK if evaluation.get("served_weights") else DOMAIN_TASK
    deciding_metric = metric
    if exam_decides:
        decisive, deciding_metric = CLOSED_BOOK, ANSWERS
    reference = "incumbent" if incumbent is not None else "base"
    effect = settings.smallest_effect
    comparisons = [compare(scores, deciding_metric, decisive, reference, alpha, allowed, effect)]
    rest = measured_tasks(metric)[1:]
    # Against the base model: against the incumbent, small losses would add up from week to week.
    comparisons += [compare(scores, metric.of(task), task, "base", GENERAL_LEVEL) for task in rest]
    if decisive != DOMAIN_TASK:
        comparisons.append(compare(scores, metric, DOMAIN_TASK, reference, alpha, allowed, effect))
    if pc.any(pc.equal(scores["task"], NEWEST_TASK)).as_py():
        comparisons.append(compare(scores, metric, NEWEST_TASK, reference, alpha, allowed))
    return comparisons


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
    by_role = {role: read_column(rows, f"score_{role}") for role in ("candidate", reference)}
    clusters = np.asarray(rows["cluster"].to_pylist())
    # The bounds are for losses; a metric where higher is better is turned around by its sign.
    sign = -1 if metric.higher_is_better else 1
    losses = sign * (by_role["candidate"] - by_role[reference])
    bounds = estimate(losses, read_column(rows, "size"), clusters, level, allowed)
    # The sign also swaps which of the bounds is the lower one.
    low, high = sorted((sign * bounds.low, sign * bounds.high))
    bounded = math.isfinite(bounds.high)
    return Comparison(
        task=task,
        reference=reference,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        difference=sign * bounds.difference,
        level=level,
        allowed=allowed,
        low=low if bounded else None,
        high=high if bounded else None,
        detectable=None if smallest_effect is None else bounds.detectable(smallest_effect),
        documents=len(rows),
        clusters=bounds.clusters,
    )


def _judge_chance(
    scores: pa.Table,
    evaluation: Mapping[str, Any],
    comparisons: list[Comparison],
    settings: GateSettings,
) -> list[Reason]:
    """A model that predicts hardly better than random guessing has learned nothing."""
    if not Metric.model_validate(evaluation["metric"]).is_bits:
        return []
    task = DOMAIN_TASK if settings.metric == "exam" else comparisons[0].task
    rows = rows_of(scores, task)
    # The first token of a document is given, not predicted.
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
    """What the candidate loses by quantization; None if weights serve as they were trained."""
    if not evaluation.get("served_weights"):
        return None
    bits = {}
    for task in (DOMAIN_TASK, SERVED_TASK):
        rows = rows_of(scores, task)
        total = read_column(rows, "score_candidate").sum()
        bits[task] = float(total / read_column(rows, "size").sum())
    return Quantization(
        weights=evaluation["served_weights"], evaluated=bits[DOMAIN_TASK], served=bits[SERVED_TASK]
    )


def _judge_decisive(comparisons: list[Comparison], settings: GateSettings) -> list[Reason]:
    """Reasons of the deciding task; if only the format is against the candidate, they say so."""
    reasons = judge_gain(comparisons[0], settings)
    exact = next(comparison for comparison in comparisons if comparison.task == DOMAIN_TASK)
    if not reasons or comparisons[0].task != SERVED_TASK or judge_gain(exact, settings):
        return reasons
    text = f"{reasons[0].text} With its weights as they were trained it would have been better."
    return [Outcome.QUANTIZATION.because(text)]


def judge_gain(found: Comparison, settings: GateSettings) -> list[Reason]:
    """Why a comparison shows no gain that matters; empty if it does."""
    is_better = found.surest_gain is not None and found.surest_gain > 0
    # The bound keeps the gate's promise; the smallest effect spares a rollout that is not worth it.
    # A bound beyond the effect would take more text and promise more than is needed.
    if is_better and found.gain >= settings.smallest_effect:
        return []
    # These may be the same weights, whose scores no amount of text tells apart.
    if found.difference == 0 and found.low == 0:
        text = f"Candidate and {found.reference} score the same on {_text(found)}."
        return [Outcome.TIE.because(text)]
    shortfall = "the upper bound is not below zero"
    if found.higher_is_better:
        shortfall = "the lower bound is not above zero"
    if is_better:
        shortfall = f"the smallest effect that matters is {settings.smallest_effect:g}"
    power = f"A gain of {found.detectable:.4f} would have been detected with 80% power."
    if documents := found.documents_to_decide(settings.smallest_effect):
        # So a reader can tell a model that is not better from a text too short to show it.
        power += (
            f" If the true gain is the measured one, about {documents:,} {_counted(found)} are "
            "needed."
        )
    return [Outcome.NOT_BETTER.because(f"{_measured(found)}: {shortfall}. {power}")]


def _judge_general(comparisons: list[Comparison], settings: GateSettings) -> list[Reason]:
    return [
        Outcome.GENERAL_REGRESSION.because(
            f"{_measured(comparison)}: the upper bound is above the tolerance of "
            f"{settings.general_tolerance:g}."
        )
        for comparison in comparisons
        if comparison.task == GENERAL_TASK
        # A loss is a gain below zero; without a bound, nothing shows that it is within the
        # tolerance.
        and (comparison.surest_gain is None or -comparison.surest_gain > settings.general_tolerance)
    ]


def _judge_floors(metrics: Metrics, settings: GateSettings) -> list[Reason]:
    reasons = []
    for name, floor in settings.floors.items():
        value, base = (metrics[name][role]["value"] or 0.0 for role in ("candidate", "base"))
        if value < floor:
            text = f"The candidate's {name} of {value:.4g} is under its floor of {floor:g}; the "
            # A floor that the base model misses, too, may be too high for any candidate.
            text += f"base model's is {base:.4g}."
            reasons.append(Outcome.BELOW_FLOOR.because(text))
    return reasons


def praise(found: Comparison, has_incumbent: bool) -> Reason:
    if has_incumbent:
        return Outcome.BETTER.because(f"{_measured(found)}.")
    return Outcome.NO_INCUMBENT.because(f"There is no incumbent yet. {_measured(found)}.")


def _measured(result: Comparison) -> str:
    sure = 100 * (1 - 2 * result.level)
    bounds = [f"{b:+.4f}" if b is not None else "unbounded" for b in (result.low, result.high)]
    reference = "base model" if result.reference == "base" else result.reference
    return (
        f"On {_text(result)} the candidate differs in {result.unit} from the {reference} by "
        f"{result.difference:+.4f} ({sure:.6g}% interval {bounds[0]} to {bounds[1]}, "
        f"{result.clusters} {_counted(result)})"
    )


def _text(result: Comparison) -> str:
    names = {
        DOMAIN_TASK: "held-out text",
        SERVED_TASK: "held-out text (as served)",
        CLOSED_BOOK: "the exam, closed book,",
        GENERAL_TASK: "general English",
    }
    return names.get(result.task, result.task)


def _counted(result: Comparison) -> str:
    """What the clusters of a comparison are; tasks outside the graph are lm-eval's."""
    if result.task == CLOSED_BOOK:
        return "facts"
    of_documents = (DOMAIN_TASK, SERVED_TASK, GENERAL_TASK, NEWEST_TASK)
    return "independent documents" if result.task in of_documents else "independent questions"
