"""Looks whether everything in a store is what its records say, and mends what can be mended.

It also checks records, trainings, caches, registry and endpoint. Repairing removes nothing except
forgotten text: what is damaged is moved to `damaged/`, so it no longer exists as an artifact, and
is rebuilt when it is needed.
"""

import contextlib
import fnmatch
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from artifacts import checkpoints
from artifacts.errors import DamagedArtifact, UserError, first_line, make_command
from artifacts.progress import Report
from artifacts.reasons import reason_of
from artifacts.storage import files
from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.manifest import find_faults
from artifacts.store.pipelines import Pipeline, RegistryMark
from artifacts.store.store import Artifact, Store
from llm_assets.forgetting.certificate import restore_list
from llm_assets.forgetting.erase import erase, find_brought_back
from llm_assets.forgetting.forgotten_list import (
    find_copy,
    give_up_signatures,
    keep_copy,
    read_list,
)
from llm_assets.maintenance.cleaning import Inventory, take_inventory
from llm_assets.registry.base import Registry, read_decisions
from llm_assets.registry.card import weights_at
from llm_assets.registry.start import find_manifest, retire
from llm_assets.registry.state import GATE, Alias, RegistryDamaged, RegistryState
from recipes.spec import METRICS_NAME, RESULT_NAME, read_metrics, read_result
from serving.state import StateFolder
from spark_jobs.clean.forgotten import read_signatures

MODELS = ("checkpoint", "base_model")
"""Artifacts that hold a model."""
ASSETS = ("raw_corpus", "clean_corpus", "tokenized_shards", "eval_metrics", *MODELS)
"""Assets that versions are built from."""


@dataclass(frozen=True)
class StoreFault:
    """Something that is wrong."""

    place: str
    """Path relative to the store's root."""
    fault: str
    remedy: str
    """What `repair` does or, if that is None, what a person can do or has to know."""
    repair: Callable[[], object] | None = None
    is_fault: bool = True
    """False for what is only worth knowing: something was deleted and is rebuilt when needed."""


@dataclass(frozen=True)
class Examination:
    """What a store was found to be like."""

    root: str
    artifacts: int
    """How many were read."""
    findings: list[StoreFault]

    @property
    def faults(self) -> list[StoreFault]:
        """The findings that are more than worth knowing."""
        return [finding for finding in self.findings if finding.is_fault]

    def repair(self, report: Report) -> list[StoreFault]:
        """Mend what can be mended, and report why what could not be; returns the faults left."""
        remaining = []
        for finding in self.faults:
            if finding.repair is None:
                remaining.append(finding)
                continue
            try:
                finding.repair()
            except (UserError, OSError) as error:
                # Another user's file, for one, must not keep the other faults from being mended.
                report(f"{finding.place}: {reason_of(error) or error}")
                remaining.append(finding)
        return remaining

    def lines(self, repairing: bool) -> Iterator[str]:
        """Every finding with its remedy, in words."""
        for finding in self.findings:
            yield f"{finding.place}: {finding.fault.rstrip('.')}."
            can_mend = "" if repairing or finding.repair is None else "With --repair: "
            yield f"  {can_mend}{finding.remedy}."
        if not self.findings:
            yield f"Checked in {self.root}: {self.artifacts} artifact(s); everything is in order."

    def as_json(self, left: Sequence[StoreFault]) -> dict[str, Any]:
        """The same as JSON values.

        Args:
            left: the faults that are still there.
        """
        return {
            "store": self.root,
            "artifacts": self.artifacts,
            "in_order": not left,
            "findings": [
                {
                    "place": finding.place,
                    "fault": finding.fault,
                    "remedy": finding.remedy,
                    "is_fault": finding.is_fault,
                    "can_be_mended": finding.repair is not None,
                    "mended": finding.is_fault and finding not in left,
                }
                for finding in self.findings
            ],
        }


def examine(
    record: Pipeline, registry: Registry, endpoint: Path, names: Sequence[str], report: Report
) -> Examination:
    """Read a store, or some artifacts of it, byte by byte.

    Args:
        endpoint: the folder of the local endpoint's state.
        names: artifacts as `kind/fingerprint`; empty for the whole store.
        report: hears what is done, and waited for, where forgotten text is erased.

    Raises:
        UserError: a name is none, or the store has no artifact of it.
    """
    store = record.store
    inventory = take_inventory(store)
    stored = {"/".join(artifact): artifact for artifact in inventory.artifacts()}
    for name in names:
        if name.strip("/") not in stored:
            raise UserError(
                f"The store {store.root} has no artifact `{name}`. Give kind and fingerprint, such "
                "as checkpoint/0123456789abcdef0123, or nothing to check all that it has."
            )
    artifacts = [stored[name.strip("/")] for name in names or stored]
    findings = list(check_artifacts(store, artifacts))
    if not names:
        # Before the record: repairing that reads the registry's versions.
        behind = "what is behind it is neither checked here nor cleaned"
        for link in inventory.links:
            findings.append(StoreFault(link, "it is a link to a folder", behind, is_fault=False))
        findings += check_registry(store, registry, record.name)
        findings += check_record(record, registry)
        findings += check_runs(store, inventory)
        findings += check_caches(store, inventory)
        findings += check_forgotten(record, registry, report)
        findings += check_notes(store)
        if store.is_local:
            findings += check_endpoint(registry, endpoint)
    return Examination(store.root, len(artifacts), findings)


def check_artifacts(store: Store, names: Sequence[tuple[str, str]]) -> Iterator[StoreFault]:
    """Manifests, sizes and checksums of artifacts, given by kind and fingerprint.

    A folder without a manifest is no artifact, and no fault.
    """
    for kind, fingerprint in names:
        place = f"{kind}/{fingerprint}"
        artifact = None
        try:
            artifact = store.find_named(kind, fingerprint)
            faults = list(_faults(artifact)) if artifact else []
        except DamagedArtifact as error:
            faults = [str(error).split(". ")[0]]
        except UserError as error:
            # Of another version: whole, so it stays, and says nothing of the others either.
            fault, _, remedy = str(error).partition(". ")
            yield StoreFault(place, fault, remedy.rstrip("."))
            continue
        except OSError as error:
            # A file of another user says nothing of the others, nor whether it is damaged.
            yield StoreFault(place, reason_of(error) or str(error), "the rest of it is not checked")
            continue
        if faults:
            more = f", and {len(faults) - 1} more" if len(faults) > 1 else ""
            yield StoreFault(
                place,
                faults[0] + more,
                f"moved to {layout.damaged(place)}; the next run that needs it rebuilds it",
                partial(_repair, store, artifact, place),
            )


def _repair(store: Store, artifact: Artifact | None, place: str) -> None:
    """Set an artifact aside; an intact manifest still explains versions."""
    if artifact:
        # Before the artifact is moved: the records of the text that a model was trained on are
        # copied from its folder.
        retire(store, artifact.manifest, "`llm-assets doctor --repair` (it was damaged)")
        store.enter(artifact, artifact.manifest.libraries)
    store.set_aside(place)


def _faults(artifact: Artifact) -> Iterator[str]:
    manifest = artifact.manifest
    if manifest.identity.fingerprint != manifest.fingerprint:
        yield "its settings and inputs do not match its fingerprint"
    yield from find_faults(artifact.url, manifest.files)


def check_record(record: Pipeline, registry: Registry) -> Iterator[StoreFault]:
    """Whether the record of current artifacts can be read and names artifacts that exist or
    existed, and whether the records of trials can be read."""
    store = record.store
    for trial in record.trials():
        then = "the trial's next run writes it"
        yield from _unreadable(store, trial.path, trial.history, then)
    place = layout.pipeline_record(record.name)
    try:
        history = record.history()
    except DamagedArtifact:
        remedy = f"moved to {layout.damaged(place)}; rewritten from the registered versions"
        yield StoreFault(
            place, "cannot be read", remedy, partial(_restore_record, record, registry, place)
        )
        return
    for asset, entries in history.assets.items():
        if not store.exists(asset, entries.current.fingerprint):
            fault = f"{asset} {entries.current.fingerprint} is current and no longer there"
            yield StoreFault(place, fault, f"rebuild it: {make_command(asset)}", is_fault=False)
    dead = {
        (asset, entry.fingerprint)
        for asset, entries in history.assets.items()
        for entry in entries.previous
        if not _is_known(store, asset, entry.fingerprint)
    }
    if dead:
        names = ", ".join(sorted("/".join(name) for name in dead))
        fault = f"it names artifacts that are no longer there: {names}"
        yield StoreFault(place, fault, "removed from the record", partial(record.forget, dead))


def check_forgotten(record: Pipeline, registry: Registry, report: Report) -> Iterator[StoreFault]:
    """Whether the list of what was forgotten and the signatures can be read, and whether earlier
    artifacts are free of these texts."""
    store, pipeline = record.store, record.name
    place, folder = layout.forgotten(pipeline), layout.certificates(pipeline)
    try:
        forgotten = read_list(store, pipeline)
    except DamagedArtifact:
        certificates = fnmatch.filter(store.list_folder(folder), "*.json")
        remedy, repair = "restore it from a backup", None
        if certificates or find_copy(store, pipeline).documents:
            remedy = (
                f"rewritten from its second copy and {len(certificates)} certificate(s), the old "
                "file is moved to damaged/, and forgotten text that a backup brought back is erased"
            )
            repair = partial(_restore_list, record, registry, report)
        yield StoreFault(
            place, "this list of what was forgotten cannot be read, or is outdated", remedy, repair
        )
        return
    if find_copy(store, pipeline).changes < forgotten.changes:
        # Without this copy, an older list from a backup would pass for the newest.
        yield StoreFault(
            layout.forgotten_copy(pipeline),
            "the second copy of the list of what was forgotten is outdated or missing",
            "rewritten",
            partial(keep_copy, store, pipeline),
        )
    for url in forgotten.for_cleaning(f"{store.root}/{folder}").signatures:
        try:
            read_signatures([url])
        except DamagedArtifact:
            name = url.rpartition("/")[2]
            texts = sum(document.signature == name for document in forgotten.active)
            yield StoreFault(
                f"{folder}/{name}",
                "damaged or missing, so no corpus can be built",
                f"moved to damaged/; then only exact copies of its {texts} text(s) are found",
                partial(give_up_signatures, store, pipeline, name),
            )
    # A registry or file that cannot be read is reported by the other checks.
    with contextlib.suppress(UserError, pa.ArrowException, OSError):
        state = registry.state()
        holders = find_brought_back(record, state, forgotten)
        if holders:
            names = ", ".join(
                f"{artifact.manifest.kind}/{artifact.fingerprint}" for artifact in holders
            )
            yield StoreFault(
                place,
                f"{names} contain forgotten text, as artifacts from an older backup do",
                "it is erased from them",
                partial(erase, record, state, forgotten, report),
            )


def _restore_list(record: Pipeline, registry: Registry, report: Report) -> None:
    restore_list(record.store, record.name)
    forgotten = read_list(record.store, record.name)
    erase(record, registry.state(), forgotten, report)


def check_runs(store: Store, inventory: Inventory) -> Iterator[StoreFault]:
    """Checkpoints of trainings byte by byte, and whether their figures can be read."""
    remedy = "a training run that resumes uses what is intact"
    for run in inventory.runs():
        place = layout.run(run)
        for step, fault in checkpoints.find_damaged(f"{store.root}/{place}"):
            yield _aside(store, f"{place}/step-{step}", fault, remedy)
        # Their readers take a folder of this machine.
        if not store.is_local:
            continue
        folder = store.local_path(f"{store.root}/{place}")
        for name, read in ((RESULT_NAME, read_result), (METRICS_NAME, read_metrics)):
            yield from _unreadable(store, f"{place}/{name}", partial(read, folder), remedy)


def check_caches(store: Store, inventory: Inventory) -> Iterator[StoreFault]:
    """Cached tables with the checksums of their pages; a damaged one is removed by mending."""
    for cached in inventory.cached:
        if not cached.path.endswith(".parquet"):
            continue
        path = f"{store.root}/{cached.path}"
        try:
            with files.open_file(path) as file:
                table = pq.ParquetFile(file, page_checksum_verification=True)
                for number in range(table.num_row_groups):
                    table.read_row_group(number)
        except (pa.ArrowException, OSError) as error:
            yield StoreFault(
                cached.path,
                f"cannot be read ({first_line(error)})",
                "removed; the next run fills the cache again",
                partial(files.remove, path),
            )


def check_registry(store: Store, registry: Registry, pipeline: str) -> Iterator[StoreFault]:
    """Whether the registry can be read and fits together, and its versions are what there is."""
    place = layout.registry(pipeline)
    try:
        state = registry.state()
        contradictions = list(find_contradictions(state))
        contradictions += [
            f"version {entry.version} points to other weights than those registered"
            for entry in state.versions
            if weights_at(store, entry.model_url) not in (None, entry.weights)
        ]
    except RegistryDamaged as error:
        # What else it says is how to mend it, which is done here.
        fault, remedy = str(error).partition(". ")[0], "restored to its newest readable state"
        yield StoreFault(place, fault, remedy, registry.restore)
        return
    except UserError as error:
        fault = str(error).partition("\n")[0]
        yield StoreFault(place, fault, "its versions are unknown until it can be read")
        return
    for fault in contradictions:
        yield StoreFault(
            place, fault, "restore it from a backup; something else than llm-assets changed it"
        )
    read = partial(read_decisions, store, pipeline)
    then = "rewritten from the registry at its next change"
    yield from _unreadable(store, layout.decisions(pipeline), read, then)
    current, pointed = _recorded(Pipeline(store, pipeline)), state.aliases
    behind: dict[tuple[str, str], list[int]] = defaultdict(list)
    for version in state.versions:
        for item in version.lineage.items():
            behind[item].append(version.version)
    for (kind, fingerprint), standing in behind.items():
        name = f"{kind}/{fingerprint}"
        aliases = [alias for alias, number in pointed.items() if number in standing]
        numbers = ", ".join(map(str, standing))
        # Only models behind an alias are needed to serve; all else is described by its manifest.
        if kind in MODELS and aliases and not store.exists(kind, fingerprint):
            fault = f"{name}, behind {' and '.join(sorted(aliases))}, is no longer there"
            yield StoreFault(place, fault, f"rebuild it, if it is current: {make_command(kind)}")
        elif fingerprint not in current and not _is_known(store, kind, fingerprint):
            fault = f"{name}, behind version(s) {numbers}, is gone, and so is its manifest"
            remedy = "`llm-assets explain VERSION` describes them without it"
            yield StoreFault(place, fault, remedy, is_fault=False)


def check_endpoint(registry: Registry, state_folder: Path) -> Iterator[StoreFault]:
    """Whether the local endpoint, where it runs, serves the champion."""
    serves = StateFolder(state_folder).running
    try:
        champion = registry.find("champion")
    except UserError:
        return  # What `check_registry` says of a registry that cannot be read is enough.
    # An endpoint that rolls out serves two versions, of which the champion is one.
    if serves and champion and str(champion.version) not in {r.version for r in serves.routes}:
        served = ", ".join(route.version for route in serves.routes) or "nothing"
        yield StoreFault(
            layout.endpoint(state_folder.name),
            f"version {champion.version} is the champion, but the endpoint serves {served}",
            f"serve it: {make_command('endpoint')}",
        )


def check_notes(store: Store) -> Iterator[StoreFault]:
    """Small files beside the artifacts, parts of which another tool's backup may have brought back:
    records of what was made, manifests of deleted artifacts, notes of what is being made."""
    read: Callable[[], object]
    for place in _places(store, layout.EDITIONS_FOLDER):
        read = partial(store.read_editions, place)
        yield from _unreadable(store, place, read, "rewritten by the next run")
    for place in _places(store, layout.RETIRED_FOLDER):
        read = partial(find_manifest, store, *place.split("/")[1:])
        less = "`llm-assets explain VERSION` then says less about the versions built from it"
        yield from _unreadable(store, place, read, less)
    for name in store.list_folder(layout.MAKING_FOLDER):
        place = f"{layout.MAKING_FOLDER}/{name}"
        read = partial(Identity.model_validate_json, store.read_bytes(place) or b"")
        yield from _unreadable(store, place, read, "nothing else needs it")


def _places(store: Store, folder: str) -> Iterator[str]:
    for kind in sorted(store.list_folder(folder)):
        for name in sorted(store.list_folder(f"{folder}/{kind}")):
            yield f"{folder}/{kind}/{name}"


def _restore_record(record: Pipeline, registry: Registry, place: str) -> None:
    """Enter what the registered versions were built from, the newest version last.

    Without the record, the next corpus would not know the splits that models were trained on.
    """
    # Read while the damaged record is still there: if the registry cannot be read either, nothing
    # is moved.
    versions = registry.state().versions
    record.store.set_aside(place)
    for version in sorted(versions, key=lambda version: version.version):
        for kind, fingerprint in version.lineage.items():
            if record.store.exists(kind, fingerprint):
                record.advance(record.store.load(kind, fingerprint))
    # Otherwise a registry from an older backup would pass for the newest until its next change.
    state = registry.state()
    mark = RegistryMark(generation=state.generation, next_version=state.next_version)
    record.note(registry=mark)


def _recorded(record: Pipeline) -> set[str | None]:
    try:
        return set(map(record.recorded, ASSETS))
    except DamagedArtifact:
        return set()


def _is_known(store: Store, kind: str, fingerprint: str) -> bool:
    try:
        return find_manifest(store, kind, fingerprint) is not None
    except UserError:
        # A manifest that cannot be read is not gone; other checks report it.
        return True


def _unreadable(
    store: Store, place: str, read: Callable[[], object], then: str
) -> Iterator[StoreFault]:
    try:
        read()
    except (DamagedArtifact, ValidationError):
        yield _aside(store, place, "cannot be read", then)


def _aside(store: Store, place: str, fault: str, then: str) -> StoreFault:
    remedy = f"moved to {layout.damaged(place)}; {then}"
    return StoreFault(place, fault, remedy, partial(store.set_aside, place))


def find_contradictions(state: RegistryState) -> Iterator[str]:
    """Facts that contradict each other; a state that only `RegistryState` changed has none."""
    numbers = Counter(f"number {version.version}" for version in state.versions)
    models = Counter(f"model {version.weights}" for version in state.versions)
    for subject, count in [*numbers.items(), *models.items()]:
        if count > 1:
            yield f"the {subject} is registered {count} times"
    by_number = {version.version: version for version in state.versions}
    if by_number and max(by_number) >= state.next_version:
        yield f"version {max(by_number)} exists, but {state.next_version} would be the next number"
    mentioned = {move.version for move in state.history} | {*state.succession}
    # What follows looks up versions by numbers that are mentioned, so it has to end here.
    if unknown := sorted(mentioned - by_number.keys()):
        yield f"version {unknown[0]} is in the history, but not registered"
        return
    last: dict[Alias, int] = {move.alias: move.version for move in state.history}
    if state.succession and last.get("wanted") != state.succession[-1]:
        yield f"version {state.succession[-1]} is wanted, but `wanted` last moved to another"
    if state.champion != last.get("champion"):
        yield f"version {state.champion} is the champion, but another one served last"
    if state.succession and state.is_rejected(by_number[state.succession[-1]].weights):
        yield f"version {state.succession[-1]} is wanted, though a person rejected it"
    for previous, move in pairwise(move for move in state.history if move.alias == "wanted"):
        old, new = by_number[previous.version], by_number[move.version]
        verdicts = state.verdicts_of(new.weights, old.weights)
        is_deserved = new.is_base or any(verdict.promoted for verdict in verdicts)
        if move.by == GATE and not is_deserved:
            yield f"the gate moved to version {new.version} without a verdict for it"
