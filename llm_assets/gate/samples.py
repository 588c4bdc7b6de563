"""Judges two files of samples that lm-evaluation-harness wrote, without a pipeline.

`lm_eval --log_samples` writes what a model made of each question of a task, a line each. Both
models are asked the same, so their answers are paired, which that program's own comparison leaves
out (EleutherAI/lm-evaluation-harness#3831), and judged by the gate's bounds.
"""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from artifacts.errors import UserError
from llm_assets.gate.judge import compare, judge_gain, once_a_cluster, praise
from llm_assets.gate.verdict import Comparison, GateSettings, Outcome, Reason
from recipes.evaluation.settings import Metric
from recipes.evaluation.statistics import spend

NO_METRICS = frozenset(
    {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"}
    | {"doc_hash", "prompt_hash", "target_hash"}
)
"""What a line holds besides its metrics."""
BITS = {
    "bits_per_byte": "bits per byte",
    "byte_perplexity": "bits per byte",
    "word_perplexity": "bits per word",
    "perplexity": "bits per answer",
}
"""Metrics whose samples are a log-likelihood and the size of its text, or that of one answer."""
_NAME = re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.:-]+")


class SamplesVerdict(BaseModel):
    """What the gate says to two files."""

    promoted: bool
    reasons: list[Reason]
    metric: str
    comparison: Comparison


@dataclass(frozen=True)
class ScoredAnswer:
    """What a model made of a question."""

    question: str
    """A hash of it."""
    cluster: str
    """Questions of one cluster count once."""
    value: Any
    place: str
    """File and line, for messages."""


def judge_samples(
    candidate: Path,
    incumbent: Path,
    settings: GateSettings,
    *,
    look: int,
    metric: str | None,
    chosen_filter: str | None,
    lower_is_better: bool,
) -> SamplesVerdict:
    """Whether a candidate's answers are better than an incumbent's by more than chance.

    Args:
        look: 1, and one more for each comparison of a series that found no gain.
        metric: the name of one in the files; the first by default.
        chosen_filter: of lm-eval's, where a task has several.

    Raises:
        UserError: a file is none of samples, was cut, or asks other questions than the other one.
    """
    rows = {path: _read(path, chosen_filter) for path in (candidate, incumbent)}
    metric = metric or next(iter(_metrics_of(rows[candidate][0][1])), "acc")
    asked, reference = (_answers(rows[path], metric) for path in (candidate, incumbent))
    _same_questions(candidate, asked, incumbent, reference)
    named = _NAME.match(candidate.stem)
    task = named[1] if named else candidate.stem
    unit = BITS.get(metric)
    scored = [_score(one, metric, unit) for one in asked.values()]
    scores = {
        "task": [task] * len(asked),
        "cluster": [one.cluster for one in asked.values()],
        "size": [size for _, size in scored],
        "score_candidate": [score for score, _ in scored],
        "score_incumbent": [_score(reference[name], metric, unit)[0] for name in asked],
    }
    measured = Metric(
        name=metric, unit=unit or f"{metric} scores", higher_is_better=not (unit or lower_is_better)
    )
    at = spend(settings.lifetime_error, look)
    effect = settings.smallest_effect
    table = once_a_cluster(pa.table(scores))
    found = compare(table, measured, task, "incumbent", at, smallest_effect=effect)
    against = _too_few(found, settings) or judge_gain(found, settings)
    return SamplesVerdict(
        promoted=not against,
        reasons=against or [praise(found, has_incumbent=True)],
        metric=metric,
        comparison=found,
    )


def _too_few(found: Comparison, settings: GateSettings) -> list[Reason]:
    if found.clusters >= settings.minimum_documents:
        return []
    text = (
        f"Only {found.clusters} different questions were asked; "
        f"{settings.minimum_documents} are needed to decide. Raise lm-eval's --limit, or choose a "
        "larger task."
    )
    return [Outcome.TOO_FEW_DOCUMENTS.because(text)]


def _read(path: Path, chosen: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Place and content of each line, by one filter."""
    try:
        lines = path.read_text("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8: {error}. {_WANTED}") from error
    places = [(f"{path}, line {at}", line) for at, line in enumerate(lines, 1) if line.strip()]
    rows = [(place, _row(place, line)) for place, line in places]
    if not rows:
        raise UserError(f"{path} is empty. {_WANTED}")
    by_filter: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for place, row in rows:
        by_filter.setdefault(str(row.get("filter", "none")), []).append((place, row))
    if chosen is None and len(by_filter) > 1:
        raise UserError(
            f"{path} contains answers from several filters ({', '.join(by_filter)}). Choose one "
            "with --filter."
        )
    chosen = next(iter(by_filter)) if chosen is None else chosen
    if chosen not in by_filter:
        only = ", ".join(by_filter)
        raise UserError(f"{path} has no answers from the filter {chosen}, only {only}.")
    return by_filter[chosen]


_WANTED = "Give a file samples_TASK_TIME.jsonl, as `lm_eval --log_samples --output_path` writes it."


def _row(place: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(
            f"{place} is not JSON ({error}): the file was cut or has another format. {_WANTED}"
        ) from error
    if not isinstance(row, dict) or "doc_id" not in row:
        raise UserError(f"{place} is not a sample: it has no `doc_id`. {_WANTED}")
    return row


def _metrics_of(row: dict[str, Any]) -> list[str]:
    return [name for name in row if name not in NO_METRICS]


def _answers(rows: list[tuple[str, dict[str, Any]]], metric: str) -> dict[str, ScoredAnswer]:
    answers: dict[str, ScoredAnswer] = {}
    for place, row in rows:
        if metric not in row:
            raise UserError(
                f"{place} has no metric {metric}; it has {', '.join(_metrics_of(row)) or 'none'}. "
                "Choose one with --metric."
            )
        name, doc = str(row["doc_id"]), row.get("doc")
        if name in answers:
            raise UserError(
                f"{place} answers the question {name} again, after {answers[name].place}: the "
                "file contains two runs. Keep one of them."
            )
        question = str(row.get("doc_hash") or json.dumps(doc, sort_keys=True))
        # Questions that one document or fact is behind say so, as those of an exam do.
        cluster = str(doc["cluster"]) if isinstance(doc, dict) and "cluster" in doc else question
        answers[name] = ScoredAnswer(question, cluster, row[metric], place)
    return answers


def _same_questions(
    candidate: Path,
    asked: dict[str, ScoredAnswer],
    incumbent: Path,
    reference: dict[str, ScoredAnswer],
) -> None:
    ask_again = "Run both models on the same task with the same --limit."
    lacks = {incumbent: asked.keys() - reference.keys(), candidate: reference.keys() - asked.keys()}
    for path, missing in lacks.items():
        if missing:
            raise UserError(
                f"{path} lacks {len(missing)} questions that the other file has, such as doc_id "
                f"{min(missing, key=lambda name: (len(name), name))}: it was cut, or its "
                f"model was asked fewer. {ask_again}"
            )
    for name, one in asked.items():
        if one.question != reference[name].question:
            raise UserError(
                f"{one.place} and {reference[name].place}: doc_id {name} is a different "
                "question in each. They are from different tasks or versions of a task. "
                f"{ask_again}"
            )


def _score(one: ScoredAnswer, metric: str, unit: str | None) -> tuple[float, float]:
    """Bits of a text and its size, or the metric's value and one."""
    match one.value:
        case [int() | float() as likelihood, int() as size] if (
            unit and size > 0 and math.isfinite(likelihood)
        ):
            return -likelihood / math.log(2), float(size)
        case int() | float() as likelihood if (
            metric == "perplexity" and -math.inf < likelihood <= 0
        ):
            return -likelihood / math.log(2), 1.0
        case int() | float() as value if not unit and math.isfinite(value):
            return float(value), 1.0
    wanted = "a log-likelihood and a size" if unit else "a finite number"
    wanted = "a log-likelihood" if metric == "perplexity" else wanted
    told = repr(one.value)
    raise UserError(
        f"{one.place}: {metric} is {told if len(told) < 40 else told[:37] + '...'}, not {wanted}. "
        "Choose another metric with --metric."
    )
