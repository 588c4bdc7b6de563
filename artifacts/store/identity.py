"""What makes an artifact that artifact: kind, code version, settings, inputs and libraries."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from artifacts.libraries import changes, installed

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
    libraries: dict[str, str] = Field(default_factory=dict)
    """Library to its version, of those that decide the content; none of what was made before they
    were recorded."""
    remade: str = ""
    """A hash of the content, only where the same kind, code, settings, inputs and libraries once
    gave other content."""

    @property
    def fingerprint(self) -> str:
        """The first 20 hexadecimal digits of a SHA-256 over the canonical JSON form."""
        # Empty fields are left out, so that artifacts from before these two fields keep their
        # fingerprints.
        return hash_json(
            {name: value for name, value in self if value or name not in ("libraries", "remade")}
        )

    def extend(
        self,
        *,
        settings: Mapping[str, Any] | None = None,
        inputs: Mapping[str, str] | None = None,
        libraries: Iterable[str] = (),
    ) -> "Identity":
        """The identity with other settings, with more inputs, or with libraries as installed."""
        update = {
            "settings": self.settings if settings is None else dict(settings),
            "inputs": self.inputs | dict(inputs or {}),
            "libraries": self.libraries | installed(libraries),
        }
        return self.model_copy(update=update)

    @property
    def asked(self) -> str:
        """The fingerprint of what a pipeline asks for, whatever libraries make it."""
        return self.model_copy(update={"libraries": {}, "remade": ""}).fingerprint


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
    changed = changes(old.libraries, new.libraries)
    return lines + [f"library {name}: {how}" for name, how in changed.items()]


def _flatten(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat |= _flatten(item, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = item
    return flat
