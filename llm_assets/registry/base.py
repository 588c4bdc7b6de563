"""The registry of one pipeline's model versions, wherever it is kept."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeVar

from pydantic import ValidationError

from artifacts.errors import UserError
from llm_assets.gate.verdict import Verdict
from llm_assets.registry.card import render_card
from llm_assets.registry.records import (
    Alias,
    ModelEntry,
    ModelVersion,
    Move,
    RegistryDamaged,
    RegistryUnreachable,
)
from llm_assets.registry.state import RegistryState

STATE_NAME = "registry.json"
BACKUP_NAME = "registry.before.json"
"""The state before the last change, for the day on which the state is lost."""
ATTEMPTS = 20

Result = TypeVar("Result")
Content = tuple[bytes, int] | None
"""A file's bytes and the generation that a conditional write has to name; None where absent."""


class GenerationChanged(Exception):
    """Somebody else changed the file since it was read."""


class Registry(ABC):
    """Model versions of one pipeline: one state, changed by compare-and-set.

    What may happen is said by `RegistryState`; a registry reads it, and replaces exactly what it
    read. So of two changes at one time the second sees the first. `wanted` moves by a decision,
    `champion` only when the endpoint confirms that the version serves.

    Every method raises RegistryUnreachable where the registry cannot be asked, and RegistryDamaged
    where its file is lost or cannot be read.
    """

    root: str
    """The store's root, under which models lie."""
    folder: str
    """Where the registry's files are, as messages name it."""

    @abstractmethod
    def _read(self, name: str) -> Content:
        """A file of the registry."""

    @abstractmethod
    def _write(self, name: str, content: bytes, generation: int | None) -> None:
        """Replace a file; with a generation only if it still has that one (0: is still absent).

        Raises:
            GenerationChanged: it has another.
        """

    @abstractmethod
    def _published(self) -> set[int]:
        """Numbers of the versions that were published, by what lies beside the state."""

    @abstractmethod
    def _publish(self, state: RegistryState, touched: list[ModelVersion]) -> None:
        """Show a state to others: cards, uploads, aliases. Done twice it is done once.

        Args:
            touched: the versions that the change was about.
        """

    def state(self) -> RegistryState:
        """All that is recorded; models' addresses are where they lie now."""
        state, _ = self._load()
        located = [self._locate(version) for version in state.versions]
        return state.model_copy(update={"versions": located})

    def versions(self) -> list[ModelVersion]:
        """All versions, oldest first."""
        return self.state().versions

    def get(self, version: int) -> ModelVersion:
        """One version; raises UnknownVersion."""
        return self.state().get(version)

    def find(self, alias: Alias) -> ModelVersion | None:
        """The version an alias points to, or None where it points nowhere."""
        return self.state().find(alias)

    def history(self) -> list[Move]:
        """Every move of an alias, oldest first."""
        return self.state().history

    def register_base(self, entry: ModelEntry) -> ModelVersion:
        """See `RegistryState.register_base`."""
        return self._locate(self._change(lambda state: state.register_base(self._relative(entry))))

    def enter(self, entry: ModelEntry, verdict: Verdict) -> ModelVersion:
        """See `RegistryState.enter`; raises IncumbentChanged."""
        return self._locate(self._change(lambda state: state.enter(self._relative(entry), verdict)))

    def approve(self, version: int, name: str, reason: str) -> ModelVersion:
        """See `RegistryState.approve`."""
        return self._locate(self._change(lambda state: state.approve(version, name, reason)))

    def reject(self, version: int, name: str, reason: str) -> ModelVersion:
        """See `RegistryState.reject`."""
        return self._locate(self._change(lambda state: state.reject(version, name, reason)))

    def roll_back(self, name: str, reason: str) -> ModelVersion:
        """See `RegistryState.roll_back`."""
        return self._locate(self._change(lambda state: state.roll_back(name, reason)))

    def confirm(self, version: int, found: str = "") -> None:
        """See `RegistryState.confirm`."""
        self._change(lambda state: state.confirm(version, found))

    def restore(self) -> RegistryState:
        """Put the state before the last change in the place of one that is lost or damaged.

        Version numbers that were published since are not given again.

        Raises:
            RegistryDamaged: there is no such state, or it is damaged too.
            UserError: the state is neither lost nor damaged.
        """
        found = self._read(STATE_NAME)
        with contextlib.suppress(RegistryDamaged):
            self._load()
            raise UserError(f"{self.folder}/{STATE_NAME} can be read: there is nothing to restore.")
        backup = self._read(BACKUP_NAME)
        if backup is None:
            raise RegistryDamaged(
                f"{self.folder}/{BACKUP_NAME} is absent, so nothing can be restored. Bring "
                f"{self.folder} back from a backup of yours, or move it away to begin again with "
                "the base model."
            )
        state = self._parse(BACKUP_NAME, backup[0])
        state.next_version = max([state.next_version, *(n + 1 for n in self._published())])
        state.generation += 1
        self._write(STATE_NAME, _content(state), found[1] if found else 0)
        self._publish(state, state.versions)
        return state

    def _change(self, transition: Callable[[RegistryState], Result]) -> Result:
        for _ in range(ATTEMPTS):
            state, generation = self._load()
            before = state.model_copy(update={"versions": list(state.versions)})
            result = transition(state)
            if state != before:
                state.generation += 1
                try:
                    self._save(before, state, generation)
                except GenerationChanged:
                    continue
            self._publish(state, _touched(before, state, result))
            return result
        raise RegistryUnreachable(
            f"{self.folder}/{STATE_NAME} was changed by others {ATTEMPTS} times in a row while "
            "this change was being made. Nothing was changed: ask again."
        )

    def _save(self, before: RegistryState, state: RegistryState, generation: int) -> None:
        if generation:
            self._write(BACKUP_NAME, _content(before), None)
        self._write(STATE_NAME, _content(state), generation)

    def _load(self) -> tuple[RegistryState, int]:
        found = self._read(STATE_NAME)
        if found is not None:
            return self._parse(STATE_NAME, found[0]), found[1]
        if self._read(BACKUP_NAME) is None and not self._published():
            return RegistryState(), 0
        raise self._damage(STATE_NAME, "is lost, though versions were registered")

    def _parse(self, name: str, content: bytes) -> RegistryState:
        try:
            return RegistryState.model_validate_json(content)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"]) or "the file"
            raise self._damage(name, f"cannot be read ({place}: {first['msg']})") from error

    def _damage(self, name: str, fault: str) -> RegistryDamaged:
        return RegistryDamaged(
            f"{self.folder}/{name} {fault}. Nobody knows which model is to serve, so nothing was "
            "promoted; what serves goes on serving. Bring the file back from a backup, or run "
            "`llm-assets restore-registry`, which goes back to before the last change."
        )

    def _relative(self, entry: ModelEntry) -> ModelEntry:
        url = entry.model_url.removeprefix(f"{self.root}/")
        return entry.model_copy(update={"model_url": url})

    def _locate(self, version: ModelVersion) -> ModelVersion:
        url = version.model_url
        if "://" in url or url.startswith("/"):
            return version
        return version.model_copy(update={"model_url": f"{self.root}/{url}"})


def _content(state: RegistryState) -> bytes:
    return state.model_dump_json(indent=2).encode()


def _touched(before: RegistryState, state: RegistryState, result: object) -> list[ModelVersion]:
    """The versions whose card a change rewrites, and the one that it returns."""
    cards = {version.version: render_card(before, version) for version in before.versions}
    return [
        version
        for version in state.versions
        if version is result or render_card(state, version) != cards.get(version.version)
    ]
