"""What a registry records: models, what people decided about them, and who serves."""

from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from artifacts.errors import UserError

Alias = Literal["wanted", "champion", "previous"]
"""`wanted` was decided on last; `champion` serves; `previous` is where a rollback goes."""

GATE = "the gate"
"""Who decides where no person does."""


class RegistryUnreachable(UserError):
    """The registry cannot be asked, so nobody knows whether there is an incumbent."""


class RegistryDamaged(UserError):
    """The registry's file is lost or cannot be read; the message says how to go on."""


class UnknownVersion(UserError):
    """The registry has no such version."""


class IncumbentChanged(UserError):
    """The candidate was judged against a model that is no longer the wanted one."""


class ModelEntry(BaseModel):
    """What is registered: the model, where it comes from and what was measured."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    weights: str
    """Fingerprint of the model's files: who the model is, whatever made it."""
    model_fingerprint: str
    """Of the artifact that holds the model."""
    model_url: str
    """Its Hugging Face folder; recorded relative to the store, so that a store can move."""
    license: str
    """SPDX name, or `unknown`."""
    lineage: dict[str, str]
    """Asset to fingerprint of everything behind the model, down to the raw corpus."""
    coverage: float | None = None
    """Share of the training text that the model and those before it were trained on; None for a
    base model, of which nothing is known."""
    dollars: float | None = None
    """What the machines cost that made all of the lineage; None where no cost is on record."""
    evaluation: dict[str, Any] = {}
    """`stats` of the newest `eval_metrics` artifact; empty for a base model."""


class ModelVersion(ModelEntry):
    """A registered model."""

    version: int
    """Counted from 0, the first base model; never given twice."""
    is_base: bool = False
    """A base model, which nothing judged."""
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class Decision(BaseModel):
    """A person's word on a model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    weights: str
    approved: bool
    name: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class Move(BaseModel):
    """One step of an alias's history."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    alias: Alias
    version: int
    by: str
    reason: str
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))
