"""What came of a trial, and the table of all of them."""

from collections.abc import Iterable
from typing import Any, Literal

import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from artifacts.progress import format_duration
from artifacts.store.store import Artifact
from llm_assets.assets.training_plan import training_cost
from llm_assets.gate.judge import compare
from llm_assets.gate.verdict import Comparison, GateSettings
from recipes.evaluation.settings import SCORES_NAME, Metric

SPLIT = "validation"
"""Whoever picks the best of several models picks chance along with it. On held-out text that would
be spent from the gate's promise; validation text is there to choose by."""
CONFIDENCE = 0.95
"""With which the intervals of all trials hold together (Bonferroni)."""
COLUMNS = ("settings", "score", "gain", "interval", "verdict", "training", "cost")
Finding = Literal["better", "worse", "not told apart", "too few documents", "failed"]


class TrialResult(BaseModel):
    """One row of the table."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    trial: str
    """What was changed."""
    verdict: Finding
    """Against the reference; `failed` where there is no model or no figure."""
    reason: str = ""
    """Why it failed."""
    reference: str = ""
    """What it was held against: `incumbent`, the version that is wanted, or `base`."""
    metric: str = ""
    """Name of the recipe's metric, on validation text."""
    score: float | None = None
    gain: float | None = None
    """How much better than the reference it was measured, in the metric's unit."""
    gain_low: float | None = None
    gain_high: float | None = None
    """Between these all trials' gains lie at 95 %; None for no bound."""
    documents: int = 0
    """Independent validation documents."""
    training_seconds: float | None = None
    """What the training took, whenever it was."""
    cost: float | None = None
    """The same in money, at `automation.cost_per_hour`."""


def read_result(
    trial: str,
    checkpoint: Artifact,
    measured: Artifact,
    gate: GateSettings,
    trials: int,
    cost_per_hour: float | None,
) -> TrialResult:
    """The result of a trial that ran to its end.

    Args:
        checkpoint, measured: its `checkpoint` and `trial_metrics`.
        trials: how many there are; the more, the wider the intervals.
    """
    stats = measured.stats
    told: dict[str, Any] = {"trial": trial} | training_cost(checkpoint.stats, cost_per_hour)
    if stats["faults"]:
        return TrialResult(verdict="failed", reason=" ".join(stats["faults"].values()), **told)
    metric = Metric.model_validate(stats["metric"])
    reference = "incumbent" if "incumbent" in stats["models"] else "base"
    level = (1 - CONFIDENCE) / 2 / trials
    scores = pq.read_table(measured.path / SCORES_NAME)
    found = compare(scores, metric, SPLIT, reference, level)
    score = stats["metrics"][f"{SPLIT}_{metric.name}"]["candidate"]["value"]
    if score is None:
        return TrialResult(verdict="failed", reason="Its scores are not finite numbers.", **told)
    return TrialResult(
        verdict=finding(found, gate),
        reference=reference,
        metric=metric.name,
        score=score,
        gain=found.gain,
        gain_low=found.surest_gain,
        gain_high=found.largest_gain,
        documents=found.clusters,
        **told,
    )


def finding(found: Comparison, gate: GateSettings) -> Finding:
    """What a comparison says; what would not matter to the gate is no gain here either."""
    low, high = found.surest_gain, found.largest_gain
    if found.clusters < gate.minimum_documents:
        return "too few documents"
    if low is not None and low > 0 and found.gain >= gate.smallest_effect:
        return "better"
    return "worse" if high is not None and high < 0 else "not told apart"


def ranked(results: Iterable[TrialResult]) -> list[TrialResult]:
    """The largest gain first, what failed last."""
    return sorted(results, key=lambda one: -(one.gain if one.gain is not None else float("-inf")))


def rows(results: Iterable[TrialResult]) -> list[tuple[str, ...]]:
    """The table's rows in words, in the order of COLUMNS; keys by their last part."""
    return [
        (
            _short(one.trial),
            _number(one.score),
            _number(one.gain, "+"),
            f"{_number(one.gain_low, '+')} to {_number(one.gain_high, '+')}",
            one.verdict + (f": {one.reason}" if one.reason else ""),
            "" if one.training_seconds is None else format_duration(one.training_seconds),
            "" if one.cost is None else f"{one.cost:.2f}",
        )
        for one in ranked(results)
    ]


def caption(results: Iterable[TrialResult]) -> str:
    """What the figures of the table are."""
    measured = [one for one in results if one.gain is not None]
    if not measured:
        return "Nothing could be measured."
    one = measured[0]
    against = "the version that is wanted" if one.reference == "incumbent" else "the base model"
    return (
        f"Score: {one.metric.replace('_', ' ')} on {one.documents} independent validation "
        f"documents; gain over {against}, all intervals together at {CONFIDENCE:.0%}. Nothing was "
        "promoted."
    )


def _short(trial: str) -> str:
    keys = (change.rpartition("=") for change in trial.split())
    return " ".join(f"{key.rpartition('.')[2]}{sign}{value}" for key, sign, value in keys)


def _number(value: float | None, sign: str = "") -> str:
    return "?" if value is None else f"{value:{sign}.4f}"
