"""Brings a backup into a project's folder: artifacts first, what refers to them last."""

from pathlib import Path

from artifacts.errors import DamagedArtifact, UserError
from artifacts.progress import Report
from artifacts.storage.machine import make_private
from artifacts.store import layout
from artifacts.store.manifest import parse_manifest
from artifacts.store.store import Store
from llm_assets.backup.copying import copy_file, copy_known, need_space, total_bytes
from llm_assets.backup.snapshot import (
    ARTIFACTS,
    HISTORY,
    RECORDS,
    SETTINGS,
    Snapshot,
    newest_snapshot,
)
from llm_assets.config import load_settings
from llm_assets.history import sqlite_folder

COMES_LAST = (layout.REGISTRY_FOLDER, layout.PIPELINES_FOLDER)
"""Of the records: what refers to the others."""


def restore(folder: Path, config: Path | None, report: Report) -> Path:
    """Bring the newest snapshot into the folder where this runs; returns the pipeline file.

    Settings files that are there stay as they are, so that `store` can be set to another place
    before.

    Args:
        folder: of the backup.
        config: the pipeline file to go by, where it is there; otherwise the one of the backup is.

    Raises:
        UserError: there is a store or a history already, or the disk is too small.
        DamagedArtifact: a file of the backup is not what was copied; nothing refers to it yet.
    """
    snapshot, described = newest_snapshot(folder)
    _check_whole(snapshot, folder, described)
    for name in _under(described, SETTINGS):
        if not Path(name).exists():
            copy_file(snapshot / SETTINGS / name, Path(name), name)
    path = config if config and config.exists() else Path(described.config)
    store = Store(load_settings(path).store)
    history = sqlite_folder(Path())
    _need_empty(store, history)
    root = Path(store.root)
    places = [layout.artifact(*name) for name in described.artifacts]
    needed = total_bytes(p for place in places for p in (folder / ARTIFACTS / place).rglob("*"))
    need_space(root, needed + sum(entry.bytes for entry in described.files))
    make_private(root)
    for place in places:
        _restore_artifact(folder / ARTIFACTS / place, root / place)
    if history:
        for name in _under(described, HISTORY):
            copy_file(snapshot / HISTORY / name, history / name, name)
    records = sorted(_under(described, RECORDS), key=lambda name: name.startswith(COMES_LAST))
    for name in records:
        copy_file(snapshot / RECORDS / name, root / name, name)
    report(f"{len(places)} artifacts and {len(records)} records of {described.created_at:%c} UTC.")
    return path


def _under(described: Snapshot, part: str) -> list[str]:
    """Files of one part of a snapshot, relative to that part's folder."""
    return [
        entry.path.removeprefix(f"{part}/")
        for entry in described.files
        if entry.path.startswith(f"{part}/")
    ]


def _check_whole(snapshot: Path, folder: Path, described: Snapshot) -> None:
    """Raise DamagedArtifact where a file of the backup is absent or has another size."""
    wanted = [(snapshot / entry.path, entry) for entry in described.files]
    manifests = [folder / ARTIFACTS / layout.manifest(*name) for name in described.artifacts]
    absent = [str(path) for path in manifests if not path.is_file()]
    absent += [str(path) for path, entry in wanted if _size(path) != entry.bytes]
    if absent:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise DamagedArtifact(
            f"The backup is not whole: {absent[0]}{more} is absent or has another size. Use "
            "another one; nothing was restored."
        )


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _need_empty(store: Store, history: Path | None) -> None:
    if not store.is_local:
        raise UserError(
            f"The store {store.root} is in Cloud Storage; a backup goes to a local one."
        )
    for place in (Path(store.root), history):
        if place is not None and place.is_dir() and any(place.iterdir()):
            raise UserError(
                f"{place} is there already, and is not overwritten. Restore in another folder, or "
                "move it away."
            )


def _restore_artifact(source: Path, target: Path) -> None:
    manifest = parse_manifest((source / layout.MANIFEST_NAME).read_bytes(), str(source))
    if manifest.location is None:
        for entry in manifest.files:
            copy_known(source, target, entry)
    copy_file(source / layout.MANIFEST_NAME, target / layout.MANIFEST_NAME, layout.MANIFEST_NAME)
