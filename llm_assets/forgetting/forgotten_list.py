"""The list of what a pipeline has forgotten: who decided about which documents, and why.

What is on the list is in no later corpus and in no later training. It has a second copy, beside the
registry, so that a list that is damaged, lost or from an older backup is noticed and restored.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts.errors import DamagedArtifact, UserError, shown_in_line
from artifacts.settings import first_fault
from artifacts.store import layout
from artifacts.store.identity import hash_json
from artifacts.store.store import Store
from spark_jobs.clean.forgotten import ForgottenText, ForgottenTexts

FORGOTTEN_INPUT = "forgotten"
"""Name of the list's digest among a clean corpus's inputs; absent while the list is empty."""

PLAN = "plan "
"""Prefix of the line in which a listing names its plan."""

Similar = Literal["drop", "keep"]
"""What a person decided about other documents that hold a forgotten text."""


class Record(BaseModel):
    """Entry of the list or a certificate: immutable, and without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ForgetDecision(Record):
    """Who decided about a document, and why."""

    by: str = Field(min_length=1)
    reason: str = Field(min_length=1)
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))

    def __str__(self) -> str:
        return f"{self.at:%Y-%m-%d} by {shown_in_line(self.by)} ({shown_in_line(self.reason)})"


class ForgottenDocument(ForgetDecision):
    """A document that was forgotten; of its text a hash and a signature are kept."""

    id: str
    source: str
    text_hash: str | None
    """None for a copy that was dropped with its cluster, and for a document without text."""
    survivor: str | None = None
    """For such a copy, the document kept in its place; for a document forgotten because it holds
    another's text, that other one: with a different text it may return."""
    similarity: float | None = None
    """Of these two texts (`spark_jobs.clean.forgotten`)."""
    signature: str | None = None
    """File with the signature of its text, in the folder of the certificates; None if documents
    that hold it are not looked for, as in lists of earlier versions of this program."""
    similar: Similar | None = None
    """None where nobody decided: what holds its text is dropped, as long as that is little."""
    numbered: bool = False
    """Whether its id is a row number in a file, which passes to another row once an earlier row
    is removed: then only its text identifies it."""
    undone: ForgetDecision | None = None
    """That it is wanted again."""

    def __str__(self) -> str:
        holder = self.survivor if self.similarity else None
        like = f" for containing text of {shown_in_line(holder)}" if holder else ""
        undone = f", wanted again since {self.undone}" if self.undone else ""
        return f"{shown_in_line(self.id)}: forgotten{like} {super().__str__()}{undone}"

    def belongs_to(self, ids: Collection[str]) -> bool:
        """Whether it is one of these documents, or was forgotten with one."""
        return self.id in ids or self.survivor in ids


class WithdrawnVersion(Record):
    """A version that was trained on what was forgotten, so that its weights are to go."""

    version: int
    checkpoint: str
    """Fingerprint."""
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class ForgottenList(BaseModel):
    """All of them, oldest first, and what became of the versions that read them."""

    model_config = ConfigDict(extra="forbid")

    changes: int = 0
    """Number of changes so far, by which an outdated list from a backup is noticed."""
    documents: list[ForgottenDocument] = []
    withdrawn: list[WithdrawnVersion] = []

    @property
    def active(self) -> list[ForgottenDocument]:
        """Those that nobody wanted again."""
        return [document for document in self.documents if document.undone is None]

    @property
    def ids(self) -> list[str]:
        """Ids under which no document may return, whatever its text."""
        # A row number may have passed to another row, which it would keep out.
        by_id = [document for document in self.active if not document.numbered]
        # A document that was forgotten because it holds another's text may return with a different
        # one. A copy that was dropped has no hash, so only its id can keep it out.
        return sorted({d.id for d in by_id if d.survivor is None or d.text_hash is None})

    @property
    def texts(self) -> list[str]:
        """Hashes of the texts, each once."""
        return sorted({document.text_hash for document in self.active if document.text_hash})

    def refuse_withdrawn(self, version: int) -> None:
        """Raise UserError for a version that was trained on what was forgotten since."""
        since = next((entry.at for entry in self.withdrawn if entry.version == version), None)
        if since is not None:
            raise UserError(
                f"Version {version} was withdrawn on {since:%Y-%m-%d}, because it was trained on "
                "text that was forgotten: it can no longer be served or published. `llm-assets "
                "versions` lists the others; `llm-assets run` trains one without that text."
            )

    def for_cleaning(self, folder: str = "") -> ForgottenTexts:
        """What cleaning leaves out; `folder` is where the signatures lie."""
        signed = [entry for entry in self.active if entry.signature and entry.similar != "keep"]
        searched = {
            text: ForgottenText(id=entry.id, text_hash=text, confirmed=entry.similar == "drop")
            for entry in signed
            if (text := entry.text_hash)
        }
        return ForgottenTexts(
            ids=tuple(self.ids),
            texts=tuple(self.texts),
            searched=tuple(searched[text] for text in sorted(searched)),
            signatures=tuple(sorted({f"{folder}/{entry.signature}" for entry in signed})),
        )

    def inputs(self) -> dict[str, str]:
        """Its part of a clean corpus's inputs."""
        if not self.documents:
            return {}
        # Where signatures lie, and what looked alike in one corpus, is no part of what was asked.
        excluded = {"signatures", "similar", "similar_ids"}
        # Only what cleaning leaves out decides the corpus: who decided, when and why would give the
        # same text another fingerprint.
        content = self.for_cleaning().model_dump(mode="json", exclude=excluded)
        # An earlier corpus of the same text lacks what is wanted again since.
        undone = sorted(document.id for document in self.documents if document.undone)
        return {FORGOTTEN_INPUT: hash_json(content | {"undone": undone})[:20]}


def forgotten_folder(store: Store, pipeline: str) -> str:
    """URL of the folder with the signatures and certificates of a pipeline."""
    return f"{store.root}/{layout.certificates(pipeline)}"


def read_list(store: Store, pipeline: str) -> ForgottenList:
    """The list of a pipeline, empty where nothing was forgotten; raises DamagedArtifact."""
    place = layout.forgotten(pipeline)
    content = store.read_bytes(place)
    names = store.list_folder(layout.certificates(pipeline)) if content is None else []
    if any(name.endswith(".json") for name in names):
        raise _damaged(f"{store.root}/{place}", "is no longer there, though certificates are")
    forgotten = _parse(content, f"{store.root}/{place}")
    newest = find_copy(store, pipeline)
    if forgotten.changes < newest.changes:
        raise _damaged(
            f"{store.root}/{place}",
            f"is an older one: it reflects {forgotten.changes} of {newest.changes} changes",
        )
    return forgotten


def find_copy(store: Store, pipeline: str) -> ForgottenList:
    """The second copy of a list; empty where it is absent or cannot be read."""
    place = layout.forgotten_copy(pipeline)
    with contextlib.suppress(DamagedArtifact):
        return _parse(store.read_bytes(place), place)
    return ForgottenList()


def _parse(content: bytes | None, place: str) -> ForgottenList:
    try:
        return ForgottenList.model_validate_json(b"{}" if content is None else content)
    except ValidationError as error:
        raise _damaged(place, f"cannot be read ({first_fault(error)})") from None


def _damaged(place: str, fault: str) -> DamagedArtifact:
    return DamagedArtifact(
        f"{place}, which lists what was forgotten, {fault}: no corpus is built while forgotten "
        "text could come back. Restore the file from a backup of the store, or rewrite it from its "
        "second copy and the certificates beside it with: llm-assets doctor --repair"
    )


def add_to_list(
    store: Store,
    pipeline: str,
    documents: Sequence[ForgottenDocument] = (),
    withdrawn: Sequence[WithdrawnVersion] = (),
) -> None:
    """Enter documents and versions; entries that are on the list already stay unchanged."""

    def enter(forgotten: ForgottenList) -> None:
        entries = forgotten.documents
        # An entry that was undone does not count: a document may be wanted again, and forgotten
        # once more.
        place_of = {(d.id, d.text_hash): n for n, d in enumerate(entries) if d.undone is None}
        for document in documents:
            place = place_of.get((document.id, document.text_hash))
            if place is None:
                forgotten.documents.append(document)
            elif document.numbered:
                # The row was back in a corpus, so its number identified it until now.
                at = max(document.at, entries[place].at)
                entries[place] = entries[place].model_copy(update={"at": at})
        recorded = {entry.checkpoint for entry in forgotten.withdrawn}
        forgotten.withdrawn += [entry for entry in withdrawn if entry.checkpoint not in recorded]

    _change(store, pipeline, enter)


def change_documents(
    store: Store, pipeline: str, chosen: Callable[[ForgottenDocument], bool], **update: Any
) -> None:
    """Change the entries of some documents, among those that nobody wanted again."""

    def enter(forgotten: ForgottenList) -> None:
        forgotten.documents = [
            entry.model_copy(update=update) if entry.undone is None and chosen(entry) else entry
            for entry in forgotten.documents
        ]

    _change(store, pipeline, enter)


def give_up_signatures(store: Store, pipeline: str, file: str) -> None:
    """Set a damaged file of signatures aside; of its texts, only exact copies are found then."""
    # The list first: as long as it names a file that is gone, no corpus can be built.
    change_documents(store, pipeline, lambda document: document.signature == file, signature=None)
    store.set_aside(f"{layout.certificates(pipeline)}/{file}")


def _change(store: Store, pipeline: str, enter: Callable[[ForgottenList], None]) -> None:
    """Change the list atomically, then its copy."""
    place = layout.forgotten(pipeline)

    def change(content: bytes | None) -> bytes | None:
        forgotten = _parse(content, f"{store.root}/{place}")
        original = forgotten.model_copy(deep=True)
        enter(forgotten)
        if forgotten == original:
            return None
        # Counted, so that an older list from a backup is noticed.
        forgotten.changes += 1
        return forgotten.model_dump_json(indent=2).encode()

    # The list before its copy: a list that is older than its copy counts as outdated.
    store.update(place, change)
    keep_copy(store, pipeline)


def keep_copy(store: Store, pipeline: str) -> None:
    """Copy the list, unless the copy is newer, and the signatures."""
    forgotten = read_list(store, pipeline)
    source, copies = layout.certificates(pipeline), layout.forgotten_copies(pipeline)
    # Before the list that names them, so that a copy is never without its signatures.
    copy_signatures(store, forgotten, source, copies)

    def change(content: bytes | None) -> bytes | None:
        with contextlib.suppress(DamagedArtifact):
            # Another process may have changed the list, and copied it, since it was read here.
            if _parse(content, place).changes >= forgotten.changes:
                return None
        return forgotten.model_dump_json(indent=2).encode()

    place = layout.forgotten_copy(pipeline)
    store.update(place, change)


def copy_signatures(store: Store, listed: ForgottenList, source: str, target: str) -> None:
    """Copy the files of a list that one folder of the store has and another has not."""
    names = {document.signature for document in listed.active if document.signature}
    for name in sorted(names - set(store.list_folder(target))):
        content = store.read_bytes(f"{source}/{name}")
        if content is not None:
            store.write_bytes(f"{target}/{name}", content)
