"""The verdict on a candidate: what was found, what was asked for, and why."""

from datetime import UTC, datetime
from enum import StrEnum

from pydantic import BaseModel, ConfigDict, Field

from llm_assets.gate.settings import GateSettings


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
    """The gain that would have been found with a probability of 80 %."""
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
        if self.higher_is_better or self.high is None:
            return self.low if self.higher_is_better else None
        return -self.high

    @property
    def largest_gain(self) -> float | None:
        """The gain at the other bound; None for no bound."""
        if self.higher_is_better or self.low is None:
            return self.high if self.higher_is_better else None
        return -self.low


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
            f"held-out text, and {self.evaluated:.4f} as it was trained: the format costs "
            f"{lost:+.4f} ({lost / self.evaluated:+.2%})."
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
    """Which judgement of the pipeline's life this was; each spends a part of `lifetime_error`."""
    procedure: str = ""
    """Fingerprint of what people chose for making and judging the candidate; empty where that is
    not known."""
    evaluation_fingerprint: str | None
    quantization: Quantization | None = None
    """None where weights serve as they were trained."""
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @property
    def question(self) -> tuple[object, ...]:
        """What was asked: models, measurement, thresholds and code."""
        return (
            self.weights,
            self.against,
            self.evaluation_fingerprint,
            self.thresholds.model_dump_json(),
            self.gate_code_version,
        )

    @property
    def lines(self) -> list[str]:
        """What there is to say to people: the reasons, and what quantized weights lose."""
        lost = [str(self.quantization)] if self.quantization else []
        return [reason.text for reason in self.reasons] + lost

    @property
    def summary(self) -> str:
        """The same in one line."""
        return " ".join(self.lines)
