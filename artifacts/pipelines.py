"""`pipelines/<name>.json`: which artifact of each asset is current, and which were before.

Folders named by fingerprints tell a person nothing; this record does, and downstream stages read
their inputs through it.
"""

from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field

from artifacts.errors import MissingArtifact
from artifacts.identity import Identity, differences
from artifacts.store import Artifact, Store


class Entry(BaseModel):
    """One artifact an asset has pointed to."""

    model_config = ConfigDict(extra="forbid")

    fingerprint: str
    since: datetime


class AssetHistory(BaseModel):
    """The current artifact of one asset and its predecessors, newest first."""

    model_config = ConfigDict(extra="forbid")

    current: Entry
    previous: list[Entry] = Field(default_factory=list)


class PipelineHistory(BaseModel):
    """The content of `pipelines/<name>.json`."""

    model_config = ConfigDict(extra="forbid")

    assets: dict[str, AssetHistory] = Field(default_factory=dict)


class Pipeline:
    """The named pipeline's view of a store."""

    def __init__(self, store: Store, name: str) -> None:
        self.store = store
        self.name = name
        self._path = f"pipelines/{name}.json"

    def history(self) -> PipelineHistory:
        """Everything recorded so far; empty for a pipeline that has made nothing."""
        content = self.store.read_bytes(self._path)
        return PipelineHistory.model_validate_json(content) if content else PipelineHistory()

    def find_current(self, asset: str) -> Artifact | None:
        """The asset's current artifact, or None where it was never made."""
        history = self.history().assets.get(asset)
        return self.store.load(asset, history.current.fingerprint) if history else None

    def current(self, asset: str, needed_by: str) -> Artifact:
        """The asset's current artifact; raises MissingArtifact with the command that makes it."""
        artifact = self.find_current(asset)
        if artifact is None:
            raise MissingArtifact(
                f"`{needed_by}` needs `{asset}`, which has not been made yet in {self.store.root}. "
                f'Make it and all before it with: dagster asset materialize --select "*{needed_by}"'
            )
        return artifact

    def advance(self, artifact: Artifact) -> None:
        """Make an artifact the current one of its asset; the one before is kept in the record."""
        asset = artifact.manifest.kind
        with self.store.lease(f"pipeline-{self.name}"):
            history = self.history()
            before = history.assets.get(asset)
            if before and before.current.fingerprint == artifact.fingerprint:
                return
            previous = [before.current, *before.previous] if before else []
            entry = Entry(fingerprint=artifact.fingerprint, since=datetime.now(UTC))
            history.assets[asset] = AssetHistory(current=entry, previous=previous)
            self.store.write_bytes(self._path, history.model_dump_json(indent=2).encode())

    def explain_change(self, identity: Identity) -> list[str]:
        """What differs between an identity about to be made and the current artifact's."""
        current = self.find_current(identity.kind)
        return differences(current.manifest.identity, identity) if current else []
