"""Judges two files of samples that lm-evaluation-harness wrote, without a pipeline.

`lm_eval --log_samples` writes a line for each question of a task, with what a model made of it.
Both models are asked the same, so their answers are paired, which lm-eval's own comparison does not
do (EleutherAI/lm-evaluation-harness#3831), and judged by the gate's bounds.
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from artifacts.errors import UserError
from artifacts.progress import counted
from llm_assets.gate.judge import compare, judge_gain, once_a_cluster, praise
from llm_assets.gate.verdict import Comparison, GateSettings, Outcome, Reason
from recipes.evaluation.settings import Metric
from recipes.evaluation.statistics import spend

NO_METRICS = frozenset(
    {"doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics"}
    | {"doc_hash", "prompt_hash", "target_hash"}
)
"""Keys of a line that are not metrics."""
BITS = {
    "bits_per_byte": "bits per byte",
    "byte_perplexity": "bits per byte",
    "word_perplexity": "bits per word",
    "perplexity": "bits per answer",
}
"""Metrics whose samples are a log-likelihood and the text's size, or the log-likelihood alone."""
_NAME = re.compile(r"samples_(.+)_\d{4}-\d\d-\d\dT[\d.:-]+")


class SamplesVerdict(BaseModel):
    promoted: bool
    reasons: list[Reason]
    metric: str
    comparison: Comparison


@dataclass(frozen=True)
class ScoredAnswer:
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
    answers, reference = (_answers(rows[path], metric) for path in (candidate, incumbent))
    _same_questions(candidate, answers, incumbent, reference)
    match = _NAME.match(candidate.stem)
    task = match[1] if match else candidate.stem
    unit = BITS.get(metric)
    scored = [_score(answer, metric, unit) for answer in answers.values()]
    scores = {
        "task": [task] * len(answers),
        "cluster": [answer.cluster for answer in answers.values()],
        "size": [size for _, size in scored],
        "score_candidate": [score for score, _ in scored],
        "score_incumbent": [_score(reference[name], metric, unit)[0] for name in answers],
    }
    compared_metric = Metric(
        name=metric, unit=unit or f"{metric} scores", higher_is_better=not (unit or lower_is_better)
    )
    # As in a pipeline, `lifetime_error` is the chance of an error in a whole series of comparisons,
    # and not in each of them.
    alpha = spend(settings.lifetime_error, look)
    effect = settings.smallest_effect
    table = once_a_cluster(pa.table(scores))
    comparison = compare(table, compared_metric, task, "incumbent", alpha, smallest_effect=effect)
    if comparison.clusters >= settings.minimum_documents:
        reasons = judge_gain(comparison, settings)
    else:
        text = (
            f"The models were asked only {counted(comparison.clusters, 'different question')}; "
            f"{settings.minimum_documents} are needed to decide. Raise lm-eval's --limit, or "
            "choose a larger task."
        )
        reasons = [Outcome.TOO_FEW_DOCUMENTS.because(text)]
    return SamplesVerdict(
        promoted=not reasons,
        reasons=reasons or [praise(comparison, has_incumbent=True)],
        metric=metric,
        comparison=comparison,
    )


def _read(path: Path, filter_name: str | None) -> list[tuple[str, dict[str, Any]]]:
    """Place and content of each line, by one filter."""
    try:
        # `utf-8-sig`, since editors on Windows begin a file with a byte order mark. Not
        # `splitlines`, which also ends lines at characters that JSON may have within a text, such
        # as U+2028.
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8: {error}. {_WANTED}") from error
    places = [
        (f"{path}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    rows = [(place, _row(place, line)) for place, line in places]
    if not rows:
        raise UserError(f"{path} is empty. {_WANTED}")
    by_filter: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for place, row in rows:
        by_filter.setdefault(str(row.get("filter", "none")), []).append((place, row))
    if filter_name is None and len(by_filter) > 1:
        raise UserError(
            f"{path} contains answers from several filters ({', '.join(by_filter)}). Choose one "
            "with --filter."
        )
    filter_name = next(iter(by_filter)) if filter_name is None else filter_name
    if filter_name not in by_filter:
        only = ", ".join(by_filter)
        raise UserError(f"{path} has no answers from the filter {filter_name}, only {only}.")
    return by_filter[filter_name]


_WANTED = "Give a file samples_TASK_TIME.jsonl, as `lm_eval --log_samples --output_path` writes it."


def _row(place: str, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
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
        # Questions about the same document or fact name it in `cluster`, as an exam's do.
        cluster = str(doc["cluster"]) if isinstance(doc, dict) and "cluster" in doc else question
        answers[name] = ScoredAnswer(question, cluster, row[metric], place)
    return answers


def _same_questions(
    candidate: Path,
    answers: dict[str, ScoredAnswer],
    incumbent: Path,
    reference: dict[str, ScoredAnswer],
) -> None:
    ask_again = "Run both models on the same task with the same --limit."
    lacks = {
        incumbent: answers.keys() - reference.keys(),
        candidate: reference.keys() - answers.keys(),
    }
    for path, missing in lacks.items():
        if missing:
            raise UserError(
                f"{path} lacks {len(missing)} questions that the other file has, such as doc_id "
                # Ids are numbers written as text: by their length, 2 comes before 10.
                f"{min(missing, key=lambda name: (len(name), name))}: it was cut, or its "
                f"model was asked fewer. {ask_again}"
            )
    for name, answer in answers.items():
        if answer.question != reference[name].question:
            raise UserError(
                f"{answer.place} and {reference[name].place}: doc_id {name} is a different "
                "question in each. They are from different tasks or versions of a task. "
                f"{ask_again}"
            )


def _score(answer: ScoredAnswer, metric: str, unit: str | None) -> tuple[float, float]:
    """Bits of a text and its size, or the value of the metric and 1."""
    match answer.value:
        case [int() | float() as likelihood, int() as size] if (
            unit and size > 0 and _is_finite(likelihood) and _is_finite(size)
        ):
            return -likelihood / math.log(2), float(size)
        case int() | float() as likelihood if (
            metric == "perplexity" and likelihood <= 0 and _is_finite(likelihood)
        ):
            return -likelihood / math.log(2), 1.0
        case int() | float() as value if not unit and _is_finite(value):
            return float(value), 1.0
    need = "a log-likelihood and a size" if unit else "a finite number"
    need = "a log-likelihood" if metric == "perplexity" else need
    text = repr(answer.value)
    raise UserError(
        f"{answer.place}: {metric} is {text if len(text) < 40 else text[:37] + '...'}, not {need}. "
        "Choose another metric with --metric."
    )


def _is_finite(number: float) -> bool:
    """Whether a float holds it; JSON has whole numbers of any length."""
    return abs(number) <= sys.float_info.max
