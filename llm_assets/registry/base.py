"""What a registry of model versions offers, wherever it is kept."""

from datetime import UTC, datetime
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from artifacts.errors import UserError
from llm_assets.gate.verdict import Decision, Verdict

Alias = Literal["champion", "previous"]

BASE_VERSION = 0
"""The base model itself, which serves until a candidate is better."""


class RegistryUnreachable(UserError):
    """The registry cannot be asked, so nobody knows whether there is an incumbent."""


class UnknownVersion(UserError):
    """The registry has no such version."""


class ModelEntry(BaseModel):
    """What is registered: the model, where it comes from and what was found about it."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_fingerprint: str
    """Of the artifact that holds the model."""
    model_url: str
    """Its Hugging Face folder."""
    license: str
    """SPDX name, or `unknown`."""
    lineage: dict[str, str]
    """Asset to fingerprint of everything behind the model, down to the raw corpus."""
    evaluation: dict[str, Any] = {}
    """`stats` of the `eval_metrics` artifact."""
    verdict: Verdict | None = None
    """None for the base model, which nothing judged."""


class ModelVersion(ModelEntry):
    """A registered model."""

    version: int
    """Counted from 1; 0 is the base model."""
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class AliasMove(BaseModel):
    """One step of an alias's history."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    alias: Alias
    version: int
    reason: str
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class Registry(Protocol):
    """Model versions of one pipeline.

    Every method raises RegistryUnreachable where the registry cannot be asked.
    """

    def register(self, entry: ModelEntry) -> ModelVersion:
        """Add a version; the same model with the same evaluation is the version it was before.

        Judged again by other thresholds, that version takes over the new verdict.
        """
        ...

    def register_base(self, entry: ModelEntry) -> ModelVersion:
        """Make the base model version 0, and the champion where there is none."""
        ...

    def versions(self) -> list[ModelVersion]:
        """All versions, oldest first."""
        ...

    def get(self, version: int) -> ModelVersion:
        """One version; raises UnknownVersion."""
        ...

    def find(self, alias: Alias) -> ModelVersion | None:
        """The version an alias points to, or None where it points nowhere."""
        ...

    def promote(self, version: int, reason: str) -> None:
        """Make a version the champion, and the champion before it `previous`."""
        ...

    def decide(self, version: int, decision: Decision) -> ModelVersion:
        """Record a person's decision on a version."""
        ...

    def history(self) -> list[AliasMove]:
        """Every move of an alias, oldest first."""
        ...


def count_judgements(versions: list[ModelVersion], evaluation_fingerprint: str) -> int:
    """How many registered candidates this evaluation's held-out set has judged."""
    return sum(
        version.verdict is not None
        and version.verdict.evaluation_fingerprint == evaluation_fingerprint
        for version in versions
    )
