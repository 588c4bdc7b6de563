"""The registry of one pipeline's model versions, wherever it is kept."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

from pydantic import TypeAdapter, ValidationError

from artifacts.errors import DamagedArtifact, UserError
from artifacts.reasons import reason_of
from artifacts.settings import first_fault
from artifacts.storage import files
from artifacts.store import layout
from artifacts.store.manifest import OtherVersion, dump_with_checksum, load_with_checksum
from artifacts.store.pipelines import Pipeline, RegistryMark
from artifacts.store.store import Store
from llm_assets.gate.verdict import Verdict
from llm_assets.registry.card import CARD_NAME, render_card
from llm_assets.registry.state import (
    Alias,
    Decision,
    ModelEntry,
    ModelVersion,
    RegistryDamaged,
    RegistryState,
    RegistryUnreachable,
)

STATE_NAME = "registry.json"
BACKUP_NAME = "registry.before.json"
"""The state before the last change, in case the current one is lost."""

_DECISIONS = TypeAdapter(list[Decision])
Result = TypeVar("Result")


class Registry(ABC):
    """Model versions of one pipeline: one state, changed by compare-and-set.

    `RegistryState` defines which changes are possible; each is one atomic step of the store
    (`Store.update`), so of two simultaneous changes the second sees the first. `wanted` moves by a
    decision, `champion` only when the endpoint confirms that the version serves.

    Every method raises RegistryUnreachable where the registry cannot be asked, and RegistryDamaged
    where its file is lost or cannot be read.
    """

    def __init__(self, store: Store, pipeline: str) -> None:
        self.root, self.name = store.root, pipeline
        self._store = store
        self._known: tuple[tuple[bytes | None, list[Decision]], RegistryState]
        self._known = (None, []), RegistryState()
        """The newest content that was read, with its parsed state: with thousands of versions,
        parsing takes far longer than reading, and most callers find unchanged content."""
        self.folder = f"{store.root}/{layout.registry(pipeline)}"
        """Where the registry's files are."""
        self.place = self.folder
        """As messages name it."""

    @abstractmethod
    def _published(self) -> set[int]:
        """Numbers of the versions that were published; called within `_reachable`."""

    @abstractmethod
    def _publish(self, state: RegistryState, touched: list[ModelVersion]) -> None:
        """Publish a state: cards, uploads, aliases. Idempotent.

        Called within `_reachable`.

        Args:
            touched: the versions that the change was about.
        """

    def _faults(self) -> tuple[type[Exception], ...]:
        """What keeps the registry from being asked."""
        return (OSError,)

    @contextmanager
    def _reachable(self) -> Iterator[None]:
        """Turn what keeps the registry from being asked into an error that says so."""
        try:
            yield
        except self._faults() as error:
            raise RegistryUnreachable(
                f"The model registry {self.place} cannot be reached. "
                f"{reason_of(error) or error}\nWithout it, which model serves is unknown, so "
                "nothing was promoted."
            ) from error

    @property
    def _record(self) -> Pipeline:
        """The pipeline's, which knows how often the registry was changed."""
        return Pipeline(self._store, self.name)

    def state(self) -> RegistryState:
        """All that is recorded; models' addresses are where they lie now."""
        # The mark first: a change between the two reads then only makes the state newer than it.
        newest = self._record.registry()
        content, decisions = self._read(STATE_NAME), self._decisions()
        cached, state = self._known
        # Both are compared: the decisions can change while the state's own file stays the same.
        if content is None or cached != (content, decisions):
            state = self._parse_newest(content, newest)
            state.follow(decisions)
            located = [self._locate(version) for version in state.versions]
            state = state.model_copy(update={"versions": located})
            self._known = (content, decisions), state
        else:
            self._check_newest(state, newest)
        # A copy: callers may change what they get, but not the cached state.
        return state.model_copy(update={"versions": list(state.versions)})

    def get(self, version: int) -> ModelVersion:
        """One version; raises UnknownVersion."""
        return self.state().get(version)

    def find(self, alias: Alias) -> ModelVersion | None:
        """The version an alias points to, or None where it points nowhere."""
        return self.state().find(alias)

    def register_base(self, entry: ModelEntry) -> ModelVersion:
        """See `RegistryState.register_base`."""
        return self._change_version(lambda state: state.register_base(self._relative(entry)))

    def enter(self, entry: ModelEntry, verdict: Verdict) -> ModelVersion:
        """See `RegistryState.enter`; raises IncumbentChanged."""
        return self._change_version(lambda state: state.enter(self._relative(entry), verdict))

    def approve(
        self, version: int, name: str, reason: str, shown: int | None = None
    ) -> ModelVersion:
        """See `RegistryState.approve`, and for `shown` `RegistryState.as_shown`."""
        return self._change_version(lambda state: state.approve(version, name, reason), shown)

    def reject(
        self, version: int, name: str, reason: str, shown: int | None = None
    ) -> ModelVersion:
        """See `RegistryState.reject`, and for `shown` `RegistryState.as_shown`."""
        return self._change_version(lambda state: state.reject(version, name, reason), shown)

    def roll_back(self, name: str, reason: str, shown: int | None = None) -> ModelVersion:
        """See `RegistryState.roll_back`, and for `shown` `RegistryState.as_shown`."""
        return self._change_version(lambda state: state.roll_back(name, reason), shown)

    def confirm(self, version: int, found: str = "", wanted: int | None = None) -> bool:
        """See `RegistryState.confirm`."""
        return self._change(lambda state: state.confirm(version, found, wanted))

    def restore(self) -> RegistryState:
        """Put the newest state that can be read in the place of one that is lost or damaged.

        Version numbers that were published since are not given again.

        Raises:
            RegistryDamaged: there is no such state, or it is damaged too.
            UserError: the state is neither lost nor damaged.
        """
        newest = self._record.registry()
        states: list[RegistryState] = []

        def repair(content: bytes | None) -> bytes:
            with contextlib.suppress(RegistryDamaged):
                self._parse_newest(content, newest)
                raise UserError(
                    f"{self.folder}/{STATE_NAME} can be read: there is nothing to restore."
                )
            # `Store.update` calls this again if another writer was faster.
            states.clear()
            saved = {STATE_NAME: content, BACKUP_NAME: self._read(BACKUP_NAME)}
            # One without a checksum may have been edited, so it counts only where no other is left,
            # as in a store of an early release.
            for needed in (True, False):
                for name, one in () if states else saved.items():
                    with contextlib.suppress(RegistryDamaged):
                        states.extend([self._parse(name, one, needed)] if one else [])
            if not states:
                raise RegistryDamaged(
                    f"{self.folder}/{BACKUP_NAME} cannot be read either. Restore "
                    f"{self.folder} from a backup, or move it away to start over from the base "
                    "model."
                )
            states.sort(key=lambda state: state.generation)
            state, published = states[-1], (number + 1 for number in self._published())
            # A published number appears in logs and notes, so it must never name another model.
            state.next_version = max(state.next_version, newest.next_version, *published)
            # Newer than every state that was noted, or it would pass for an outdated one.
            state.generation = max(state.generation, newest.generation) + 1
            return dump_with_checksum(state)

        with self._reachable():
            self._store.update(self._path(STATE_NAME), repair)
            state = states[-1]
            self._note(state)
            self._publish(state, state.versions)
        return state

    def _change_version(
        self, transition: Callable[[RegistryState], ModelVersion], shown: int | None = None
    ) -> ModelVersion:
        return self._locate(self._change(lambda state: transition(state.as_shown(shown))))

    def _change(self, transition: Callable[[RegistryState], Result]) -> Result:
        # Read before the state, which others may change in the meantime.
        newest, decisions = self._record.registry(), self._decisions()
        changes: list[tuple[RegistryState, RegistryState, Result]] = []

        def change(content: bytes | None) -> bytes | None:
            state = self._parse_newest(content, newest)
            state.follow(decisions)
            # `register` changes the list of versions in place. All other lists are replaced as a
            # whole, so a shallow copy keeps them.
            before = state.model_copy(update={"versions": list(state.versions)})
            result = transition(state)
            state.follow(decisions)  # Of a model that was entered just now.
            changes[:] = [(before, state, result)]
            if state == before:
                return None
            state.generation += 1
            if content is not None:
                # Written before the new state, so that one of the two files can be read at any
                # moment.
                self._store.write_bytes(self._path(BACKUP_NAME), dump_with_checksum(before))
            return dump_with_checksum(state)

        with self._reachable():
            self._store.update(self._path(STATE_NAME), change)
            # Only the last attempt counts: if another writer was faster, `change` is called again.
            ((before, state, result),) = changes
            # After the state is written: a mark that is ahead of the state would make it pass for
            # one from an old backup.
            if state.generation > before.generation or set(state.decisions) - set(decisions):
                self._note(state)
            # Also where nothing changed: an earlier call may have been killed after it wrote the
            # state, and before it published it.
            self._publish(state, _touched(before, state, result))
        return result

    def _path(self, name: str) -> str:
        return f"{layout.registry(self.name)}/{name}"

    def _read(self, name: str) -> bytes | None:
        with self._reachable():
            return self._store.read_bytes(self._path(name))

    def _note(self, state: RegistryState) -> None:
        mark = RegistryMark(generation=state.generation, next_version=state.next_version)
        place = layout.decisions(self.name)

        def add(content: bytes | None) -> bytes | None:
            recorded = _parse_decisions(content, place)
            new = [decision for decision in state.decisions if decision not in recorded]
            all_decisions = sorted([*recorded, *new], key=lambda entry: entry.at)
            return _DECISIONS.dump_json(all_decisions, indent=2) if new else None

        # The change stands even if it cannot be noted; the next change will note it too.
        with contextlib.suppress(DamagedArtifact, OSError):
            self._record.note(registry=mark)
            self._store.update(place, add)

    def _decisions(self) -> list[Decision]:
        """All decisions of people, oldest first; empty if they cannot be read."""
        with self._reachable(), contextlib.suppress(DamagedArtifact):
            return read_decisions(self._store, self.name)
        return []

    def _parse_newest(self, content: bytes | None, newest: RegistryMark) -> RegistryState:
        """The state in a file, which must not be older than the newest one that was noted."""
        if content is not None:
            state = self._parse(STATE_NAME, content)
            self._check_newest(state, newest)
            return state
        with self._reachable():
            # Without a backup and published versions, the registry is new. One that was lost must
            # not begin again at 0, as its numbers would name other models.
            if self._read(BACKUP_NAME) is None and not self._published():
                return RegistryState()
        raise self._damage(STATE_NAME, "is lost, though versions were registered")

    def _check_newest(self, state: RegistryState, newest: RegistryMark) -> None:
        if state.generation < newest.generation:
            fault = (
                f"is an older one: it reflects {state.generation} of {newest.generation} changes"
            )
            raise self._damage(STATE_NAME, fault)

    def _parse(self, name: str, content: bytes, needed: bool = True) -> RegistryState:
        try:
            return load_with_checksum(content, RegistryState, needed)
        except OtherVersion as other:
            raise other.as_user_error(f"{self.folder}/{name}") from None
        except ValueError as fault:
            raise self._damage(name, f"cannot be read ({fault})") from None

    def _damage(self, name: str, fault: str) -> RegistryDamaged:
        return RegistryDamaged(
            f"{self.folder}/{name} {fault}. It is unknown which model is to serve, so nothing "
            "was promoted; what serves keeps serving. Restore the file from a backup, or run "
            "`llm-assets doctor --repair`, which restores the newest state that can be read."
        )

    def _relative(self, entry: ModelEntry) -> ModelEntry:
        url = entry.model_url.removeprefix(f"{self.root}/")
        return entry.model_copy(update={"model_url": url})

    def _locate(self, version: ModelVersion) -> ModelVersion:
        url = version.model_url
        if "://" in url or url.startswith("/"):
            return version
        return version.model_copy(update={"model_url": f"{self.root}/{url}"})


def read_decisions(store: Store, pipeline: str) -> list[Decision]:
    """All decisions of people about a pipeline's models, including those that a registry restored
    from a backup does not know; raises DamagedArtifact."""
    place = layout.decisions(pipeline)
    return _parse_decisions(store.read_bytes(place), f"{store.root}/{place}")


def _parse_decisions(content: bytes | None, place: str) -> list[Decision]:
    try:
        return _DECISIONS.validate_json(content or b"[]")
    except ValidationError as error:
        raise DamagedArtifact(f"{place} cannot be read ({first_fault(error)}).") from None


def _touched(before: RegistryState, state: RegistryState, result: object) -> list[ModelVersion]:
    """The versions whose cards a change rewrites, and the version that it returns."""
    cards = {version.version: render_card(before, version) for version in before.versions}
    return [
        version
        for version in state.versions
        if version is result or render_card(state, version) != cards.get(version.version)
    ]


class LocalRegistry(Registry):
    """Keeps the versions of one pipeline under `<store>/registry/<pipeline>/`."""

    def __init__(self, store_root: Path, pipeline: str) -> None:
        super().__init__(Store(str(store_root)), pipeline)

    @classmethod
    def of(cls, record: Pipeline) -> Self:
        """The registry of a pipeline whose store is on this machine."""
        store = record.store
        return cls(store.local_path(store.root), record.name)

    def _published(self) -> set[int]:
        cards = Path(self.folder).glob(f"versions/*/{CARD_NAME}")
        # A person may have copied one, as `2 (copy)`.
        return {int(card.parent.name) for card in cards if card.parent.name.isdecimal()}

    def _publish(self, state: RegistryState, touched: list[ModelVersion]) -> None:
        for version in state.versions:
            path = Path(self.folder) / "versions" / str(version.version) / CARD_NAME
            card = render_card(state, self._locate(version)).encode()
            # Of all versions, not only of those that were touched: a card that somebody deleted is
            # written again.
            if not path.exists() or path.read_bytes() != card:
                files.write(path, card)
