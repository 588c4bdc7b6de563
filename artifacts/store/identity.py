"""What makes an artifact that artifact: kind, code version, settings and inputs."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

FINGERPRINT_LENGTH = 20


class Identity(BaseModel):
    """Everything that decides what an artifact is, and nothing about how or where it is made.

    Runners, machines, partition counts, paths and the store's root never belong in here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    """The asset's name, and the artifact's folder in the store."""
    code_version: str
    """The stage's explicit version, also Dagster's `code_version`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The settings that change the artifact's content, as JSON values."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Input name to input fingerprint."""

    @property
    def fingerprint(self) -> str:
        """The first 20 hexadecimal digits of a SHA-256 over the canonical JSON form."""
        return hash_json(self.model_dump())


def hash_json(value: Mapping[str, Any]) -> str:
    """Hash a JSON value independently of key order; raises ValueError on NaN or infinity."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:FINGERPRINT_LENGTH]


def differences(old: Identity, new: Identity) -> list[str]:
    """Name what differs between two identities, one line each: `settings.steps: 24 -> 40`."""
    lines = []
    if old.code_version != new.code_version:
        lines.append(f"code version: {old.code_version} -> {new.code_version}")
    for part in ("settings", "inputs"):
        before, after = _flatten(getattr(old, part)), _flatten(getattr(new, part))
        for key in sorted(before.keys() | after.keys()):
            if before.get(key) != after.get(key):
                lines.append(
                    f"{part}.{key}: {before.get(key, 'absent')} -> {after.get(key, 'absent')}"
                )
    return lines


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat
