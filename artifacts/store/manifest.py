"""The manifest: the file that makes an artifact exist."""

import json
from datetime import UTC, datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts.errors import DamagedArtifact, mend_command
from artifacts.storage.checksums import FileEntry
from artifacts.store.identity import Identity, hash_json
from artifacts.store.layout import MANIFEST_NAME

SCHEMA_VERSION = 1
CHECKSUM = "checksum"
COST = "cost_dollars"
"""In the provenance of what others' machines made: what these cost."""


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


def dump_manifest(manifest: Manifest) -> bytes:
    """The content of `manifest.json`: the fields, and under `checksum` a hash of them all."""
    fields = json.loads(manifest.model_dump_json())
    return json.dumps(fields | {CHECKSUM: hash_json(fields)}, indent=2).encode()


def parse_manifest(content: bytes, folder: str) -> Manifest:
    """Read the content of `<folder>/manifest.json`, where folder ends in `<kind>/<fingerprint>`.

    Raises:
        DamagedArtifact: it is not what was written, or is another artifact's.
    """
    kind, fingerprint = folder.rstrip("/").split("/")[-2:]
    try:
        fields = json.loads(content)
        checksum = fields.pop(CHECKSUM)
        if checksum != hash_json(fields):
            raise ValueError("it was changed after it was written")
        manifest = Manifest.model_validate(fields)
        if (manifest.kind, manifest.fingerprint) != (kind, fingerprint):
            raise ValueError(f"it is the manifest of {manifest.kind}/{manifest.fingerprint}")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        fault = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise DamagedArtifact(
            f"{folder}/{MANIFEST_NAME} cannot be read ({fault}). Set the artifact aside and make "
            f"it again with: {mend_command(folder)}"
        ) from None
    return manifest
