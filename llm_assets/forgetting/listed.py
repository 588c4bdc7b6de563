"""The list of what a pipeline has forgotten: in no later corpus, in no later training."""

from collections.abc import Sequence
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field

from artifacts.store import layout
from artifacts.store.identity import hash_json
from artifacts.store.store import Store
from spark_jobs.clean.job import Forgotten

FORGOTTEN_INPUT = "forgotten"
"""Name of the list's digest among a clean corpus's inputs; absent while the list is empty."""


class ForgottenDocument(BaseModel):
    """A document that was forgotten; of its text the hash alone is kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    source: str
    text_hash: str | None
    """None for a copy that was dropped in its cluster: its text was never in a corpus."""
    survivor: str | None = None
    """Of such a copy, the document that was kept in its place."""
    by: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class WithdrawnVersion(BaseModel):
    """A version that was trained on what was forgotten, so that its weights are to go."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int
    checkpoint: str
    """Fingerprint."""
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class ForgottenList(BaseModel):
    """All of them, oldest first, and what became of the versions that read them."""

    model_config = ConfigDict(extra="forbid")

    documents: list[ForgottenDocument] = []
    withdrawn: list[WithdrawnVersion] = []

    @property
    def texts(self) -> list[str]:
        """Hashes of the texts, each once."""
        return sorted({one.text_hash for one in self.documents if one.text_hash})

    def for_cleaning(self) -> Forgotten:
        """What cleaning leaves out."""
        return Forgotten(ids=tuple(sorted({d.id for d in self.documents})), texts=tuple(self.texts))

    def inputs(self) -> dict[str, str]:
        """Its part of a clean corpus's inputs."""
        if not self.documents:
            return {}
        return {FORGOTTEN_INPUT: hash_json(self.for_cleaning().model_dump(mode="json"))[:20]}


def read_list(store: Store, pipeline: str) -> ForgottenList:
    """The list of a pipeline, empty where nothing was forgotten."""
    content = store.read_bytes(layout.forgotten(pipeline))
    return ForgottenList.model_validate_json(content) if content else ForgottenList()


def add_to_list(
    store: Store,
    pipeline: str,
    documents: Sequence[ForgottenDocument] = (),
    withdrawn: Sequence[WithdrawnVersion] = (),
) -> None:
    """Enter documents and versions; what is on the list already stays as it was entered."""

    def enter(content: bytes | None) -> bytes | None:
        found = ForgottenList.model_validate_json(content) if content else ForgottenList()
        known = {(one.id, one.text_hash) for one in found.documents}
        new = [one for one in documents if (one.id, one.text_hash) not in known]
        gone = {one.checkpoint for one in found.withdrawn}
        to_go = [one for one in withdrawn if one.checkpoint not in gone]
        if not new and not to_go:
            return None
        found.documents += new
        found.withdrawn += to_go
        return found.model_dump_json(indent=2).encode()

    store.update(layout.forgotten(pipeline), enter)
