"""`pipelines/<name>.json`: which artifact of each asset is current, and which were before.

Folders named by fingerprints tell a person nothing; this record does, and downstream stages read
their inputs through it.
"""

import fnmatch
from collections.abc import Callable, Container
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts.errors import DamagedArtifact, MissingArtifact, make_command
from artifacts.settings import first_fault
from artifacts.store import layout
from artifacts.store.identity import Identity, differences
from artifacts.store.store import Artifact, Store


class AssetPointer(BaseModel):
    """One artifact an asset has pointed to."""

    model_config = ConfigDict(extra="forbid")

    fingerprint: str
    since: datetime


class AssetHistory(BaseModel):
    """The current artifact of one asset and its predecessors, newest first."""

    model_config = ConfigDict(extra="forbid")

    current: AssetPointer
    previous: list[AssetPointer] = Field(default_factory=list)


class RegistryMark(BaseModel):
    """How far the pipeline's registry has come, so that one from an older backup is recognized."""

    model_config = ConfigDict(extra="forbid")

    generation: int = 0
    next_version: int = 0


class PipelineHistory(BaseModel):
    """The content of `pipelines/<name>.json`."""

    model_config = ConfigDict(extra="forbid")

    file: str | None = None
    """The pipeline file."""
    registry: RegistryMark = RegistryMark()
    assets: dict[str, AssetHistory] = Field(default_factory=dict)


class Pipeline:
    """The named pipeline's view of a store."""

    def __init__(self, store: Store, name: str, path: str | None = None) -> None:
        """Open the pipeline's record, or another one at a path in the store."""
        self.store = store
        self.name = name
        self.path = path or layout.pipeline_record(name)
        """Of the record, in the store."""

    def trials(self) -> list["Pipeline"]:
        """The records of its trials, whose artifacts are not on its own."""
        folder = layout.trial_records(self.name)
        names = fnmatch.filter(self.store.list_folder(folder), "[!.]*.json")
        return [Pipeline(self.store, self.name, f"{folder}/{name}") for name in names]

    def history(self) -> PipelineHistory:
        """Everything recorded so far; empty for a pipeline that has made nothing."""
        return self._parse(self.store.read_bytes(self.path))

    def _parse(self, content: bytes | None) -> PipelineHistory:
        if content is None:
            return PipelineHistory()
        try:
            return PipelineHistory.model_validate_json(content)
        except ValidationError as error:
            raise DamagedArtifact(
                f"{self.store.root}/{self.path} cannot be read ({first_fault(error)}). Set "
                "it aside, and have it written again, with: llm-assets doctor --repair; "
                "llm-assets run"
            ) from None

    def find_current(self, asset: str) -> Artifact | None:
        """The asset's current artifact, or None where it was never made or is no longer there."""
        fingerprint = self.recorded(asset)
        return self.store.find_named(asset, fingerprint) if fingerprint else None

    def find_before(self, asset: str) -> Artifact | None:
        """The newest artifact before the asset's current one that is still there, if any is."""
        others = (self.store.find_named(asset, name) for name in self.known(asset)[1:])
        return next(filter(None, others), None)

    def recorded(self, asset: str) -> str | None:
        """The fingerprint on record as the asset's current one, be it still there or not."""
        return next(iter(self.known(asset)), None)

    def known(self, asset: str) -> list[str]:
        """Fingerprints of the asset's artifacts on record, the current one first."""
        history = self.history().assets.get(asset)
        entries = [history.current, *history.previous] if history else []
        return [entry.fingerprint for entry in entries]

    def current(self, asset: str, needed_by: str | None = None) -> Artifact:
        """The asset's current artifact; raises MissingArtifact with the command that makes it, and
        with the asset that reads it unless a command does."""
        artifact = self.find_current(asset)
        if artifact is None:
            fingerprint = self.recorded(asset)
            state = f"was deleted ({fingerprint})" if fingerprint else "has not been built yet"
            subject = f"`{needed_by}` needs `{asset}`, which" if needed_by else f"`{asset}`"
            raise MissingArtifact(
                f"{subject} {state} in {self.store.root}. Build it and everything upstream with: "
                f"{make_command(needed_by or asset)}"
            )
        return artifact

    def advance(self, artifact: Artifact) -> None:
        """Make an artifact the current one of its asset; the one before is kept in the record."""
        asset = artifact.manifest.kind

        def enter(history: PipelineHistory) -> None:
            before = history.assets.get(asset)
            # An artifact that is current already keeps the time since when it is.
            if before is None or before.current.fingerprint != artifact.fingerprint:
                previous = [before.current, *before.previous] if before else []
                entry = AssetPointer(fingerprint=artifact.fingerprint, since=datetime.now(UTC))
                history.assets[asset] = AssetHistory(current=entry, previous=previous)

        self._change(enter)

    def _change(self, change: Callable[[PipelineHistory], None]) -> None:
        """Change the record as one step; it stays untouched where nothing changes."""

        def enter(content: bytes | None) -> bytes | None:
            # Two copies, as `change` works in place.
            before, after = self._parse(content), self._parse(content)
            change(after)
            return None if after == before else after.model_dump_json(indent=2).encode()

        self.store.update(self.path, enter)

    def registry(self) -> RegistryMark:
        """How far the registry has come; nothing is known where the record cannot be read."""
        try:
            return self.history().registry
        except DamagedArtifact:
            return RegistryMark()

    def note(self, **about: object) -> None:
        """Note the pipeline's `file`, or how far its `registry` has come."""

        def enter(history: PipelineHistory) -> None:
            for name, value in about.items():
                setattr(history, name, value)

        self._change(enter)

    def forget(self, names: Container[tuple[str, str]]) -> None:
        """Take artifacts, by kind and fingerprint, out of what was current before."""

        def drop(history: PipelineHistory) -> None:
            for asset, entries in history.assets.items():
                entries.previous = [
                    entry for entry in entries.previous if (asset, entry.fingerprint) not in names
                ]

        self._change(drop)

    def explain_change(self, identity: Identity) -> list[str]:
        """What differs between an identity about to be made and the current artifact's."""
        current = self.find_current(identity.kind)
        if current:
            return differences(current.manifest.identity, identity)
        name = self.recorded(identity.kind)
        return [f"its absence: {identity.kind} {name} was there before"] if name else []


def read_histories(store: Store) -> dict[str, PipelineHistory]:
    """The records of every pipeline that uses a store, by name."""
    names = [name.removesuffix(".json") for name in store.list_folder(layout.PIPELINES_FOLDER)]
    return {name: Pipeline(store, name).history() for name in names}
