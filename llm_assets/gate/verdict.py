"""What a candidate must show to become champion, and the verdict: what was measured, and why."""

import math
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from artifacts.settings import Settings

CODE_VERSION = "7"
DecidingMetric = Literal["held_out", "exam"]


class GateSettings(Settings):
    """The deciding metric and the thresholds of the verdict."""

    metric: DecidingMetric = "held_out"
    """What a candidate must be better at: the recipe's metric on held-out text, or the closed-book
    questions of `exam`, where each fact counts once, however often it is asked about. General
    English (`general_tolerance`) and `floors` set limits in either case."""
    lifetime_error: float = Field(default=0.05, gt=0, lt=0.5)
    """Maximum probability that a pipeline's gate ever promotes a model that is not better, over the
    pipeline's whole life, however many candidates it judges and however often it retries."""
    smallest_effect: float = Field(default=0.005, ge=0)
    """Minimum measured gain over the incumbent, in the unit of the deciding metric (bits per byte
    or per masked token, or a share of 1); a smaller gain is not worth a rollout."""
    general_tolerance: float = Field(default=0.05, ge=0)
    """Bits per byte (or per masked token) that a candidate may lose on general English compared
    with the base model: the upper end of the loss's 95% interval must not exceed it. The base model
    is the reference so that small losses do not add up from week to week. The recipes
    `classification` and `sequence_to_sequence` have no such limit."""
    minimum_documents: int = Field(default=30, ge=30)
    """Minimum number of independent held-out documents (duplicate clusters), or of facts in the
    exam, for a verdict; below 30, the error bounds no longer hold."""
    floors: dict[str, float] = Field(default={})
    """Maps a metric of `eval_metrics`, such as `arc_easy_acc`, to the lowest value that a candidate
    may have, for scores where higher is better. A metric that was not measured is a reason to
    reject."""


class ModelVersionSettings(Settings):
    """The `model_version` asset: the registry and the gate."""

    gate: GateSettings = GateSettings()
    """What a candidate must show to become champion."""
    license: str | None = None
    """License of the new model, as an SPDX identifier; if unset, the base model's."""

    def content(self) -> dict[str, Any]:
        """What decides a verdict; gates that were settled before they had `metric` stay settled."""
        content = super().content()
        if self.gate.metric == "held_out":
            del content["gate"]["metric"]
        return content


class Outcome(StrEnum):
    """What kind of reason decided."""

    BETTER = "better"
    NO_INCUMBENT = "no_incumbent"
    NOT_BETTER = "not_better"
    TIE = "tie"
    GENERAL_REGRESSION = "general_regression"
    BELOW_FLOOR = "below_floor"
    NOT_FINITE = "not_finite"
    MISSING = "missing"
    TOO_FEW_DOCUMENTS = "too_few_documents"
    OTHER_EVALUATION = "other_evaluation"
    INCUMBENT_UNREADABLE = "incumbent_unreadable"
    CANDIDATE_UNREADABLE = "candidate_unreadable"
    CHANCE = "chance"
    QUANTIZATION = "quantization"

    def because(self, text: str) -> "Reason":
        return Reason(outcome=self, text=text)


UNCHANGING = frozenset(
    [Outcome.TOO_FEW_DOCUMENTS, Outcome.CANDIDATE_UNREADABLE, Outcome.NOT_FINITE, Outcome.MISSING]
)
"""Reasons for which nothing is compared, and which remain as long as the candidate's scores are the
same."""
UNJUDGED = UNCHANGING | {Outcome.OTHER_EVALUATION, Outcome.INCUMBENT_UNREADABLE}
"""All reasons for which nothing is compared."""


class Reason(BaseModel):
    """One finding, in words that stand alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    outcome: Outcome
    text: str


class Comparison(BaseModel):
    """A paired difference of the metric, candidate minus reference."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    reference: str
    """`incumbent` or `base`."""
    difference: float
    level: float
    """Probability with which each bound may miss the truth, at most."""
    allowed: float = 0.0
    """Standard errors by which both bounds lie farther out, for scores that people have read."""
    low: float | None
    high: float | None
    """Bounds at this level; None for no bound."""
    detectable: float | None = None
    """The gain that would have been found with a probability of 80%."""
    unit: str = "bits per byte"
    """Of the metric, in words."""
    higher_is_better: bool = False
    documents: int
    clusters: int
    """Independent documents: duplicate clusters."""

    @property
    def gain(self) -> float:
        """How much better the candidate was measured; below zero it is worse."""
        return self.difference if self.higher_is_better else -self.difference

    @property
    def surest_gain(self) -> float | None:
        """The gain at the bound that speaks most against the candidate; None for no bound."""
        return self._gain_at(self.low if self.higher_is_better else self.high)

    @property
    def largest_gain(self) -> float | None:
        """The gain at the other bound; None for no bound."""
        return self._gain_at(self.high if self.higher_is_better else self.low)

    def _gain_at(self, bound: float | None) -> float | None:
        return bound if bound is None or self.higher_is_better else -bound

    def documents_to_decide(self, smallest_effect: float) -> int | None:
        """How many clusters would find the measured gain with a probability of 80%.

        A bound's distance and the error shrink with the root of their number. None if no number
        would, because the gain is too small to matter or was not bounded.
        """
        if self.detectable is None or self.surest_gain is None or self.gain <= smallest_effect:
            return None
        margin = self.gain - self.surest_gain
        shortfall = self.detectable - max(margin, smallest_effect)
        # Margin and shortfall have to shrink to this share of their size, so that the gain is at
        # least their sum, and at least the smallest effect plus the shortfall.
        shrunk = min(self.gain / (margin + shortfall), (self.gain - smallest_effect) / shortfall)
        return math.ceil(self.clusters / shrunk**2)


class Quantization(BaseModel):
    """What the candidate loses by the format that it would serve in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: str
    """The format, as `endpoint.weights` has it."""
    evaluated: float
    """Bits per byte of held-out text by the weights as they were trained."""
    served: float
    """The same by an engine with the quantized ones."""

    def __str__(self) -> str:
        lost = self.served - self.evaluated
        return (
            f"Served in {self.weights} the candidate needs {self.served:.4f} bits per byte of "
            f"held-out text, and {self.evaluated:.4f} with its weights as they were trained: the "
            f"difference is {lost:+.4f} ({lost / self.evaluated:+.2%})."
        )


class Verdict(BaseModel):
    """What the gate found about one model against one other, as it is recorded with the model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: str
    """The candidate, by the fingerprint of its weights."""
    against: str | None
    """The incumbent's weights; None where there was no incumbent."""
    promoted: bool
    reasons: list[Reason]
    comparisons: list[Comparison]
    thresholds: GateSettings
    gate_code_version: str
    look: int
    """1, and one more for each comparison before that could have promoted and did not; decides
    which part of `lifetime_error` this one might spend."""
    procedure: str = ""
    """Fingerprint of what people chose for making and judging the candidate; empty where that is
    not known."""
    evaluation_fingerprint: str | None
    quantization: Quantization | None = None
    """None where weights serve as they were trained."""
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @property
    def is_judged(self) -> bool:
        """Whether the models were compared, so that the candidate could have been promoted."""
        return bool(self.comparisons) or not {reason.outcome for reason in self.reasons} <= UNJUDGED

    @property
    def answer(self) -> tuple[object, ...]:
        """What was asked (models, measurement, thresholds and code) and what came of it."""
        question = (self.weights, self.against, self.evaluation_fingerprint)
        gate = (self.thresholds.model_dump_json(), self.gate_code_version)
        return (*question, *gate, self.is_judged, self.promoted)

    @property
    def lines(self) -> list[str]:
        """What there is to say to people: the reasons, and what quantized weights lose."""
        losses = [str(self.quantization)] if self.quantization else []
        return [reason.text for reason in self.reasons] + losses

    @property
    def summary(self) -> str:
        """The same in one line."""
        return " ".join(self.lines)
