"""Which stored things may go, by the rules of the settings, and their removal.

One walk over the files finds what lies in a store. Everything can be rebuilt, so a mistake here
costs time, never a result. Still, nothing is removed that is current, has an alias, is being read
by running work, or is behind one of those. The listing comes first, then the removal.
"""

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import PurePosixPath
from typing import Any

from artifacts.checkpoints import find_superfluous, verify
from artifacts.progress import Report
from artifacts.storage import files
from artifacts.store import layout
from artifacts.store.manifest import Manifest
from artifacts.store.pipelines import Pipeline, PipelineHistory, read_histories
from artifacts.store.store import Store
from llm_assets.config import PipelineSettings
from llm_assets.forgetting.forgotten_list import read_list
from llm_assets.operation_settings import ForgettingSettings, RetentionSettings
from llm_assets.registry.base import Registry
from llm_assets.registry.start import retire
from llm_assets.registry.state import Alias, RegistryState

FINGERPRINT = re.compile(r"[0-9a-f]{20}")
Name = tuple[str, str]
"""Kind and fingerprint of an artifact."""
DAY_SECONDS = 86_400.0
STATE_FOLDERS = ("step-", "best")
"""Prefixes of a run's folders that hold the state from which a training resumes."""
TEMPORARY = (layout.DAMAGED_FOLDER, layout.UPLOADS_FOLDER, layout.DRAFTS_FOLDER)
"""Folders of damaged artifacts, of interrupted uploads, and of drafts
(`<kind>-<fingerprint>-...`)."""
SERVING: tuple[Alias, ...] = ("wanted", "champion")
LISTED_FILES = 10
"""Files of caches that a listing names one by one."""


@dataclass
class Folder:
    """A folder `<kind>/<name>` of the store, or a file or folder that was set aside."""

    bytes: int = 0
    changed: float = 0.0
    """When its newest file was written, or set aside, in seconds since 1970."""


@dataclass(frozen=True)
class CachedFile:
    """A file of a cache."""

    path: str
    """Relative to the store's root."""
    bytes: int
    used: float
    """When it was last used, in seconds since 1970: reading renews the time (`artifacts.cache`)."""


@dataclass
class Inventory:
    """Everything in a store: folders by `(kind, name)`, and the files of the caches."""

    folders: dict[Name, Folder] = field(default_factory=dict)
    cached: list[CachedFile] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    """Places of links to folders, which are not followed: they may lead in a circle."""

    def artifacts(self) -> list[Name]:
        """Kind and fingerprint of every folder that is, or may become, an artifact."""
        return sorted(key for key in self.folders if may_be_artifact(*key))

    @property
    def bytes(self) -> int:
        """Size of everything that is stored."""
        stored = sum(folder.bytes for folder in self.folders.values())
        return stored + sum(file.bytes for file in self.cached)

    def runs(self) -> list[str]:
        """The names of all trainings."""
        return sorted(name for kind, name in self.folders if kind == layout.RUNS_FOLDER)


def may_be_artifact(kind: str, name: str) -> bool:
    """Whether `<kind>/<name>` is the name of an artifact, finished or not."""
    is_part = kind == layout.RUNS_FOLDER or "/" in kind
    return not is_part and bool(FINGERPRINT.fullmatch(name))


def take_inventory(store: Store) -> Inventory:
    """Walk over a store once; files directly under the root or a kind are left out."""
    inventory = Inventory()
    for path, size, changed in _files(store, inventory.links):
        parts = PurePosixPath(path).parts
        if parts[0] == layout.CACHE_FOLDER:
            inventory.cached.append(CachedFile(path, size, changed))
        elif len(parts) > 2:
            key = (parts[0], parts[1])
            if parts[0] == layout.RUNS_FOLDER:
                # Each folder of a training run counts by itself.
                inventory.folders.setdefault(key, Folder())
                if len(parts) > 3:
                    key = (f"{layout.RUNS_FOLDER}/{parts[1]}", parts[2])
            elif parts[0] == layout.DAMAGED_FOLDER:
                # Each thing that was set aside has its own age: an artifact, or a file or folder of
                # a run, a registry or the like.
                *folders, name = parts[: 3 if may_be_artifact(parts[1], parts[2]) else 4]
                key = ("/".join(folders), name)
            folder = inventory.folders.setdefault(key, Folder())
            folder.bytes += size
            folder.changed = max(folder.changed, changed)
    return inventory


def _files(store: Store, links: list[str]) -> Iterator[tuple[str, int, float]]:
    """`(path, bytes, written at)` of every file; links to folders are added to `links`."""
    if not store.is_local:
        for path, entry in files.describe(store.root).items():
            yield path, entry["size"], entry["mtime"].timestamp()
        return
    for folder, folders, names in os.walk(store.root, onerror=_raise_unless_gone):
        below = folder[len(store.root) + 1 :]
        links += [
            os.path.join(below, name) for name in folders if os.path.islink(f"{folder}/{name}")
        ]
        for name in names:
            # Running work renames and removes files meanwhile.
            with suppress(FileNotFoundError):
                path = f"{folder}/{name}"
                # A link counts as itself: what it points to may lie elsewhere, and is not removed
                # with it.
                status = os.lstat(path)
                yield path[len(store.root) + 1 :], status.st_size, status.st_mtime


def _raise_unless_gone(error: OSError) -> None:
    # A folder that cannot be read may hold what others depend on, so nothing may be removed.
    if not isinstance(error, FileNotFoundError):
        raise error


@dataclass(frozen=True)
class Removal:
    """Something that may go."""

    place: str
    """Path relative to the store's root."""
    reason: str
    bytes: int
    artifact: Name | None = None
    explains: bool = False
    """Whether a registered version needs its manifest."""

    @property
    def is_cached(self) -> bool:
        """Whether it is a file of a cache."""
        return self.place.split("/")[0] == layout.CACHE_FOLDER


@dataclass(frozen=True)
class Contents:
    """What retention decides by, read from a store."""

    inventory: Inventory
    manifests: dict[Name, Manifest]
    histories: dict[str, PipelineHistory]
    """Of every pipeline that uses the store, by name."""
    running: dict[Name, Mapping[str, str]] = field(default_factory=dict)
    """What is being made just now, with its inputs."""
    superfluous: dict[Name, list[int]] = field(default_factory=dict)
    """For each interrupted training, the steps that it would not resume from."""


def read_contents(store: Store) -> Contents:
    """Walk over a store and read its manifests and records.

    Raises:
        DamagedArtifact: one of them cannot be read, so nobody knows what it needs.
    """
    inventory = take_inventory(store)
    artifacts = {name: store.find_named(*name) for name in inventory.artifacts()}
    manifests = {name: artifact.manifest for name, artifact in artifacts.items() if artifact}
    running: dict[Name, Mapping[str, str]] = {
        (i.kind, i.fingerprint): i.inputs for i in store.in_the_making()
    }
    # In a bucket, checksums would require downloading the files.
    check = partial(verify, checksums=store.is_local)
    # A training run has the fingerprint of the checkpoint that it makes.
    runs = {("checkpoint", name) for name in inventory.runs()}
    return Contents(
        inventory=inventory,
        manifests=manifests,
        histories=read_histories(store),
        running=running,
        superfluous={
            name: find_superfluous(f"{store.root}/{layout.run(name[1])}", 1, check)
            # A finished training resumes from nothing, and one that runs removes its old states.
            for name in runs - manifests.keys() - running.keys()
        },
    )


def plan_removals(
    contents: Contents,
    pipeline: str,
    state: RegistryState,
    settings: RetentionSettings,
    now: float,
    withdrawn: Mapping[Name, str],
) -> list[Removal]:
    """Everything that no rule keeps, artifacts first.

    Args:
        pipeline: whose registry's state is given; what another one ever made stays.
        now: in seconds since 1970.
        withdrawn: checkpoints that go whatever keeps them, each with the reason.
    """
    oldest = now - settings.days * DAY_SECONDS
    lasting = dict(_lasting(contents, pipeline, state, settings))
    inputs = {name: manifest.inputs for name, manifest in contents.manifests.items()}
    young = {
        name: f"younger than {settings.days:g} days"
        for name, manifest in contents.manifests.items()
        if manifest.created_at.timestamp() >= oldest
    }
    needed = reach(inputs | contents.running, young | lasting)
    # Withdrawn weights go even if a rule keeps them: they were trained on text that was forgotten.
    # Weights of versions that nobody serves or goes back to, and that no running work reads, are
    # most of what a small project has on disk: they stay by the number of versions, not by age,
    # also where a later training started from them.
    in_use = {one for inputs in contents.running.values() for one in inputs.values()}
    weights = {version.lineage.get("checkpoint", "") for version in state.versions} - in_use
    outdated = {("checkpoint", name) for name in weights}.difference(lasting) | withdrawn.keys()
    # After the walk, so that weights go alone: what they were made from is still reached.
    needed = {name: reason for name, reason in needed.items() if name not in outdated}
    explained = {item for version in state.versions for item in version.lineage.items()}
    return [
        *_artifacts(contents, needed, explained, withdrawn),
        *_runs(contents, needed, pipeline, settings, oldest),
        *_leftovers(contents, oldest),
        *_cached(contents, settings),
    ]


def remove(
    store: Store,
    removals: Sequence[Removal],
    plan_again: Callable[[], Sequence[Removal]] = lambda: (),
) -> list[Removal]:
    """Remove what was planned; an artifact's manifest first, so that no half of one exists.

    Args:
        plan_again: what may go by now, of which only the planned goes; asked after each wait.

    Returns:
        what was removed.
    """
    removed: list[Removal] = []
    still_planned = {removal.place: removal for removal in removals}
    # A full disk has no room for a lease or a retired manifest until something else is gone.
    for planned in sorted(removals, key=lambda removal: removal.artifact is not None):
        path = f"{store.root}/{planned.place}"
        if planned.artifact is None:
            files.remove(path)
            removed.append(planned)
            continue
        waited_for: list[str] = []
        with store.lease(layout.artifact_lease(*planned.artifact), waited_for.append):
            if waited_for:
                # What held the lease may have made this current, or something that was made of it.
                # Asked under the lease: nobody can begin to make this artifact between the answer
                # and the removal.
                still_planned = {removal.place: removal for removal in plan_again()}
            removal = still_planned.get(planned.place)
            if removal is None:
                continue
            removed.append(removal)
            artifact = store.find_named(*planned.artifact)
            # Registered versions still need the manifest to explain themselves.
            if artifact and removal.explains:
                retire(store, artifact.manifest, f"`llm-assets clean` ({removal.reason})")
            # First of its files: without it the artifact does not exist, so nobody reads half of
            # one.
            files.remove(f"{path}/{layout.MANIFEST_NAME}")
            files.remove(path)
    return removed


def _lasting(
    contents: Contents, pipeline: str, state: RegistryState, settings: RetentionSettings
) -> Iterator[tuple[Name, str]]:
    """What is needed at any age; for an artifact with several reasons, the last one counts."""
    newest = sorted(version.version for version in state.versions)[-settings.versions :]
    for version in state.versions:
        number = version.version
        reasons: list[str] = [*state.aliases_of(number)]
        if number in settings.keep:
            reasons.append("kept by the settings")
        # With 0, `newest` has all of them: a slice from -0 is the whole list.
        if settings.versions and number in newest:
            reasons.append(f"of the newest {settings.versions}")
        for item in version.lineage.items() if reasons else ():
            yield item, f"behind version {number} ({', '.join(reasons)})"
    for owner, history in contents.histories.items():
        for asset, entries in history.assets.items():
            # How long another pipeline keeps what it made before is for its own settings to say.
            kept_entries = (
                [entries.current] if owner == pipeline else [entries.current, *entries.previous]
            )
            for entry in kept_entries:
                yield (asset, entry.fingerprint), f"on record of {owner}"
    for name in contents.running:
        yield name, "being made"


def _artifacts(
    contents: Contents,
    needed: Container[Name],
    explained: Container[Name],
    withdrawn: Mapping[Name, str],
) -> Iterator[Removal]:
    for name, manifest in contents.manifests.items():
        if name in needed:
            continue
        unneeded = f"made {manifest.created_at:%Y-%m-%d}, and nothing that stays needs it"
        reason = withdrawn.get(name, unneeded)
        if name in explained:
            reason += "; its manifest stays, to explain the versions built from it"
        size = contents.inventory.folders[name].bytes
        yield Removal("/".join(name), reason, size, name, name in explained)


def _runs(
    contents: Contents,
    needed: Container[Name],
    pipeline: str,
    settings: RetentionSettings,
    oldest: float,
) -> Iterator[Removal]:
    """Trainings: a finished one keeps what people look at, and its state only if the pipeline that
    made it asks for that; an interrupted one keeps the state from which it resumes."""
    folders = contents.inventory.folders
    by_owner = {
        owner: {entry.fingerprint for entry in (known.current, *known.previous)}
        for owner, history in contents.histories.items()
        if (known := history.assets.get("checkpoint"))
    }
    own_runs = by_owner.pop(pipeline, set())
    of_others = set().union(*by_owner.values()) - own_runs
    for run in contents.inventory.runs():
        name, place = ("checkpoint", run), f"{layout.RUNS_FOLDER}/{run}"
        # Its program writes and removes states meanwhile.
        if name in contents.running:
            continue
        # A folder of a run is listed under `runs/<run>`, as `take_inventory` enters it.
        parts = {part: folder for (kind, part), folder in folders.items() if kind == place}
        all_parts = [folders[(layout.RUNS_FOLDER, run)], *parts.values()]
        finished = name in contents.manifests
        if finished and name in needed:
            if not settings.optimizer_state and run not in of_others:
                states = sorted(part for part in parts if part.startswith(STATE_FOLDERS))
                note = "state of a finished training run"
                yield from (
                    Removal(f"{place}/{state}", note, parts[state].bytes) for state in states
                )
        elif finished or max(part.changed for part in all_parts) < oldest:
            untouched = f"an unfinished training run, untouched for {settings.days:g} days or more"
            reason = "its checkpoint is deleted, too" if finished else untouched
            yield Removal(place, reason, sum(part.bytes for part in all_parts))
        else:
            note = "the unfinished training run resumes from a later step"
            states = [f"step-{step}" for step in contents.superfluous.get(name, [])]
            yield from (Removal(f"{place}/{state}", note, parts[state].bytes) for state in states)


def _leftovers(contents: Contents, oldest: float) -> Iterator[Removal]:
    """What was begun or set aside, and not touched for long."""
    manifests = contents.manifests
    drafts = tuple(f"{kind}-{fingerprint}-" for kind, fingerprint in contents.running)
    for (kind, name), folder in sorted(contents.inventory.folders.items()):
        fingerprint = name.removesuffix(layout.SCRATCH_SUFFIX)
        is_running = (kind, fingerprint) in contents.running or name.startswith(drafts)
        if folder.changed >= oldest or is_running:
            continue
        if kind.partition("/")[0] in TEMPORARY:
            yield Removal(f"{kind}/{name}", "set aside or interrupted", folder.bytes)
            continue
        is_made = name == fingerprint and (kind, name) in manifests
        if may_be_artifact(kind, fingerprint) and not is_made:
            yield Removal(f"{kind}/{name}", "never finished", folder.bytes)


def _cached(contents: Contents, settings: RetentionSettings) -> Iterator[Removal]:
    """The least recently used files, until the caches are small enough; none under running work."""
    excess = sum(file.bytes for file in contents.inventory.cached) - settings.cache_gb * 1e9
    if contents.running:
        return
    for file in sorted(contents.inventory.cached, key=lambda file: file.used):
        if excess <= 0:
            return
        excess -= file.bytes
        yield Removal(file.path, "least recently used file in the caches", file.bytes)


def reach(inputs: Mapping[Name, Mapping[str, str]], roots: Mapping[Name, str]) -> dict[Name, str]:
    """Everything that the roots need, each with the reason of the root that needs it.

    An input that is named after its kind (`clean_corpus`) is what an artifact was made from, and is
    followed all the way down. One with a name of its own (the model that a training started from,
    the incumbent, an earlier corpus) is kept itself, but not what it was made from: otherwise
    nothing of a lineage could ever be removed.

    Args:
        inputs: every artifact there is, with the inputs of its manifest.
        roots: artifacts that are needed in any case, and why; one that is absent needs nothing.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    for kind, fingerprint in inputs:
        kinds[fingerprint].add(kind)
    reached: dict[Name, str] = {}
    followed = [(name, reason) for name, reason in roots.items() if name in inputs]
    unfollowed: list[tuple[Name, str]] = []
    while followed:
        name, reason = followed.pop()
        if name in reached:
            continue
        reached[name] = reason
        for role, fingerprint in inputs[name].items():
            if (role, fingerprint) in inputs:
                followed.append(((role, fingerprint), reason))
            else:
                unfollowed += [((kind, fingerprint), reason) for kind in kinds[fingerprint]]
    for name, reason in unfollowed:
        reached.setdefault(name, reason)
    return reached


@dataclass(frozen=True)
class Cleaning:
    """What no rule keeps."""

    removals: Sequence[Removal]
    bytes_before: int
    """Size of the store with them."""

    @property
    def bytes(self) -> int:
        """Size of what was removed, or would be."""
        return sum(removal.bytes for removal in self.removals)

    @property
    def bytes_kept(self) -> int:
        """Of all else in the store."""
        return self.bytes_before - self.bytes

    def as_json(self) -> dict[str, Any]:
        """Each removal with its place, bytes and reason, and the sums."""
        return {
            "removals": [
                {"place": removal.place, "bytes": removal.bytes, "reason": removal.reason}
                for removal in self.removals
            ],
            "bytes": self.bytes,
            "bytes_kept": self.bytes_kept,
        }


def clean(
    record: Pipeline,
    registry: Registry,
    settings: PipelineSettings,
    delete: bool,
    report: Report,
) -> Cleaning:
    """List what no rule keeps, each with reason and size, and remove it if asked to.

    Raises:
        RegistryUnreachable: nobody knows what serves, so nothing is removed.
        DamagedArtifact: a manifest or a record cannot be read; nothing is removed.
    """

    def plan() -> Cleaning:
        contents, state, now = read_contents(record.store), registry.state(), time.time()
        withdrawn = find_withdrawn(record, state, settings.forgetting, now)
        removals = plan_removals(contents, record.name, state, settings.retention, now, withdrawn)
        return Cleaning(removals, contents.inventory.bytes)

    cleaning = plan()
    _list(cleaning, report)
    if delete:
        removed = remove(record.store, cleaning.removals, lambda: plan().removals)
        if stays := len(cleaning.removals) - len(removed):
            report(f"{stays} of them came to be needed meanwhile, and stay.")
        cleaning = replace(cleaning, removals=removed)
        # The record keeps the names of artifacts whose manifests still explain a version.
        record.forget({one.artifact for one in removed if one.artifact and not one.explains})
    line = "Nothing to delete"
    if cleaning.removals:
        amount = f"{cleaning.bytes / 1e6:,.1f} MB in {len(cleaning.removals):,} folders and files"
        line = f"{'Deleted' if delete else 'To delete'}: {amount}"
    report(f"{line}; {cleaning.bytes_kept / 1e6:,.1f} MB stay.")
    return cleaning


def _list(cleaning: Cleaning, report: Report) -> None:
    cached = [removal for removal in cleaning.removals if removal.is_cached]
    other_removals = [removal for removal in cleaning.removals if not removal.is_cached]
    for removal in [*other_removals, *cached[:LISTED_FILES]]:
        report(f"{removal.bytes / 1e6:12,.1f} MB  {removal.place}: {removal.reason}")
    if omitted := cached[LISTED_FILES:]:
        size = sum(removal.bytes for removal in omitted) / 1e6
        report(f"{size:12,.1f} MB  in {len(omitted):,} more files of the caches")


def find_withdrawn(
    record: Pipeline, state: RegistryState, settings: ForgettingSettings, now: float
) -> dict[Name, str]:
    """Checkpoints trained on forgotten text whose grace period has passed, with the reason."""
    serving = {found.model_fingerprint for alias in SERVING if (found := state.find(alias))}
    over = now - settings.grace_days * DAY_SECONDS
    reasons = {}
    for version in read_list(record.store, record.name).withdrawn:
        if version.checkpoint not in serving and version.at.timestamp() <= over:
            when = f"version {version.version} was withdrawn on {version.at:%F}"
            reasons["checkpoint", version.checkpoint] = f"{when}: it was trained on forgotten text"
    return reasons
