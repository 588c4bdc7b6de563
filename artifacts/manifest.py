"""The manifest: the file that makes an artifact exist."""

from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from artifacts.identity import Identity

MANIFEST_NAME = "manifest.json"
SCHEMA_VERSION = 1


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Relative to the artifact's folder, with forward slashes."""
    bytes: int
    sha256: str | None = None
    """None for a file that was written to Cloud Storage from elsewhere: `crc32c` stands for it."""
    crc32c: str | None = None
    """Base64, as Cloud Storage keeps it for every object; None in a local store."""


class Manifest(BaseModel):
    """Written last, so that nothing half-written is ever read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    schema_version: int = SCHEMA_VERSION
    fingerprint: str
    created_at: datetime = Field(default_factory=lambda: datetime.now(UTC))
    code_version: str
    inputs: dict[str, str]
    settings: dict[str, Any]
    files: list[FileEntry]
    stats: dict[str, Any]
    provenance: dict[str, Any] = Field(default_factory=dict)
    """How and where it was made (versions, host, run id); never part of the fingerprint."""
    location: str | None = None
    """For an adopted artifact: the folder elsewhere with the files; None means this folder."""

    @property
    def identity(self) -> Identity:
        """The identity whose fingerprint this manifest carries."""
        return Identity(
            kind=self.kind,
            code_version=self.code_version,
            settings=self.settings,
            inputs=self.inputs,
        )
