"""What a candidate must show to become champion."""

from typing import Any

from pydantic import Field

from artifacts.settings import Settings

CODE_VERSION = "1"


class GateSettings(Settings):
    """Thresholds of the verdict."""

    smallest_effect: float = Field(default=0.005, ge=0, allow_inf_nan=False)
    """Bits per byte by which a candidate must beat the incumbent on held-out text; less is not
    worth a rollout."""
    general_tolerance: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """Bits per byte that a candidate may lose against the base model on general English. The base
    is the reference, so that small losses do not add up from week to week."""
    minimum_documents: int = Field(default=30, ge=30)
    """Fewest independent held-out documents (duplicate clusters) to judge on; below 30 the interval
    no longer keeps its 2.5 %."""
    floors: dict[str, float] = Field(default={})
    """Metric name to the lowest value a candidate may have, for scores where more is better."""
    resamples: int = Field(default=4_000, ge=1_000)
    """Bootstrap resamples behind the verdict's bounds."""
    seed: int = 0
    """Of the bootstrap, so that a verdict can be computed again."""


class ModelVersionSettings(Settings):
    """The `model_version` asset: the registry and the gate."""

    gate: GateSettings = GateSettings()
    """What a candidate must show to become champion."""
    license: str | None = None
    """Licence of the new model, as an SPDX name; absent means the base model's."""

    def content(self) -> dict[str, Any]:
        """What decides the verdict, for the fingerprint."""
        return self.model_dump(mode="json")
