"""What a candidate must show to become champion."""

from typing import Any

from pydantic import Field

from artifacts.settings import Settings

CODE_VERSION = "5"


class GateSettings(Settings):
    """Thresholds of the verdict."""

    lifetime_error: float = Field(default=0.05, gt=0, lt=0.5)
    """Chance that a pipeline ever promotes a model that is not better, over its whole life, however
    many candidates it judges and however often it retries."""
    smallest_effect: float = Field(default=0.005, ge=0, allow_inf_nan=False)
    """By how much a candidate must be measured better than the incumbent on held-out text, in the
    unit of its recipe's metric (bits per byte, or a share of 1); less is not worth a rollout."""
    general_tolerance: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """Bits per byte that a candidate may lose against the base model on general English. The base
    is the reference, so that small losses do not add up from week to week."""
    minimum_documents: int = Field(default=30, ge=30)
    """Fewest independent held-out documents (duplicate clusters) to judge on; below 30 the bounds
    no longer keep their promise."""
    floors: dict[str, float] = Field(default={})
    """Metric name to the lowest value a candidate may have, for scores where more is better."""


class ModelVersionSettings(Settings):
    """The `model_version` asset: the registry and the gate."""

    gate: GateSettings = GateSettings()
    """What a candidate must show to become champion."""
    license: str | None = None
    """License of the new model, as an SPDX name; absent means the base model's."""

    def content(self) -> dict[str, Any]:
        """What decides the verdict, for the fingerprint."""
        return self.model_dump(mode="json")
