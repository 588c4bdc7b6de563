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
    APPROVED_BY_PERSON = "approved_by_person"
    REJECTED_BY_PERSON = "rejected_by_person"


class Reason(BaseModel):
    """One finding, in words that stand alone."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    outcome: Outcome
    text: str


class Comparison(BaseModel):
    """A paired difference of bits per byte, candidate minus reference; below zero is better."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task: str
    reference: str
    """`incumbent` or `base`."""
    difference: float
    low: float | None
    high: float | None
    """Bounds of the 95 % interval; None for no bound."""
    documents: int
    clusters: int
    """Independent documents: duplicate clusters."""


class Decision(BaseModel):
    """A person's word on a verdict."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    approved: bool
    name: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class Verdict(BaseModel):
    """The gate's judgement, as stored with the model version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    promoted: bool
    reasons: list[Reason]
    comparisons: list[Comparison]
    thresholds: GateSettings
    evaluation_fingerprint: str | None
    judged_before: int
    """Candidates that this held-out set has judged before; a set used often is slowly fitted."""
    decisions: list[Decision] = []
    """What people decided afterwards, oldest first; the last one holds."""

    @property
    def accepted(self) -> bool:
        """Whether the model may serve: the last person's word, else the gate's."""
        return self.decisions[-1].approved if self.decisions else self.promoted

    @property
    def summary(self) -> str:
        """One sentence for people."""
        return " ".join(reason.text for reason in self.reasons)

    def decided(self, decision: Decision) -> "Verdict":
        """The same verdict with a person's decision added."""
        return self.model_copy(update={"decisions": [*self.decisions, decision]})
