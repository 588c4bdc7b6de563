"""Takes a backup while the graph goes on working.

What refers comes first, what it refers to afterwards: registry and records are copied as they are
at the beginning, and every artifact that they name was there by then. What is made meanwhile may be
copied too, which does no harm. `backup.json` comes last.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath

from artifacts.errors import UserError
from artifacts.leases.lease import local_lease
from artifacts.progress import Report
from artifacts.storage import files
from artifacts.storage.checksums import FileEntry
from artifacts.storage.machine import make_private
from artifacts.store import layout
from artifacts.store.store import Store
from llm_assets.backup.copying import (
    DATABASE,
    OF_DATABASES,
    copy_database,
    copy_file,
    copy_known,
    need_space,
    total_bytes,
)
from llm_assets.backup.snapshot import (
    ARTIFACTS,
    HISTORY,
    RECORDS,
    SETTINGS,
    SNAPSHOT_NAME,
    Snapshot,
)
from llm_assets.config import PipelineSettings
from llm_assets.history import sqlite_folder
from llm_assets.maintenance.inventory import FINGERPRINT
from llm_assets.maintenance.retention import STATE_FOLDERS
from serving.journal import FOLDER as REQUESTS

NOT_COPIED = frozenset(
    {
        layout.CACHE_FOLDER,
        layout.DAMAGED_FOLDER,
        layout.DRAFTS_FOLDER,
        layout.LEASES_FOLDER,
        layout.MAKING_FOLDER,
        layout.UPLOADS_FOLDER,
    }
)
"""What decides speed alone, is not whole, or belongs to processes of this machine."""
PROJECT_FILES = ("dagster.yaml", "workspace.yaml", "env.sh", "config/google_cloud.yaml")
LOCK_NAME = "backup.lock"


def back_up(settings: PipelineSettings, config: Path, folder: Path, report: Report) -> Path:
    """Add a snapshot to a backup; returns the snapshot's folder.

    Args:
        config: the pipeline file.
        folder: of the backup, made if absent; artifacts that it has are not copied again.

    Raises:
        UserError: the store is in the cloud, or the disk is too small.
        DamagedArtifact: a file of the store is not what its manifest says.
    """
    store = Store(settings.store)
    if not store.is_local:
        raise UserError(
            f"The store {store.root} is in Cloud Storage, which keeps copies of its own: switch on "
            "object versioning, or copy it with `gcloud storage rsync --recursive`."
        )
    make_private(folder)
    with local_lease(folder / LOCK_NAME, lambda who: report(f"waiting for the backup by {who}")):
        root = Path(store.root)
        paths = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
        need_space(folder, total_bytes(root / path for path in paths if _is_new(path, folder)))
        snapshot = folder / f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        entries = list(_copy_records(root, paths, snapshot))
        history = sqlite_folder(Path())
        entries += _copy_history(history, snapshot) if history else []
        entries += _copy_settings(config, snapshot)
        names = [name for name in _artifacts(paths) if _copy_artifact(store, name, folder)]
        described = Snapshot(
            pipeline=settings.name,
            config=_within(config),
            artifacts=names,
            files=entries,
        )
        files.write(snapshot / SNAPSHOT_NAME, described.model_dump_json(indent=2).encode())
    size = sum(entry.bytes for entry in entries)
    report(f"{len(names)} artifacts, and {len(entries)} other files of {size / 1e6:,.1f} MB.")
    if history is None:
        report("Dagster's history is in a database of its own, and not in the backup (pg_dump).")
    return snapshot


def _is_new(path: Path, folder: Path) -> bool:
    return path.parts[0] not in NOT_COPIED and not (folder / ARTIFACTS / path).exists()


def _artifacts(paths: list[Path]) -> Iterator[tuple[str, str]]:
    """Names of what has a manifest, and so exists."""
    for path in sorted(paths):
        if _is_of_artifact(path) and path.name == layout.MANIFEST_NAME and len(path.parts) == 3:
            yield path.parts[0], path.parts[1]


def _is_of_artifact(path: Path) -> bool:
    """Whether a path of the store lies in the folder of an artifact, finished or not."""
    named = len(path.parts) > 2 and FINGERPRINT.fullmatch(path.parts[1]) is not None
    return named and path.parts[0] != layout.RUNS_FOLDER


def _copy_records(root: Path, paths: list[Path], snapshot: Path) -> Iterator[FileEntry]:
    for path in sorted(paths):
        if _is_record(PurePosixPath(path)):
            try:
                yield copy_file(root / path, snapshot / RECORDS / path, f"{RECORDS}/{path}")
            except FileNotFoundError:
                continue  # It was replaced by another, or its time was over.


def _is_record(path: PurePosixPath) -> bool:
    """Whether a file of the store is no artifact's, and is needed to explain or to go on."""
    top, *inner = path.parts
    if top in NOT_COPIED or _is_of_artifact(Path(path)):
        return False
    if top == layout.RUNS_FOLDER:
        # What a training goes on from is large and short-lived; its figures are neither.
        return len(inner) > 1 and not inner[1].startswith(STATE_FOLDERS)
    if top == layout.ENDPOINT_FOLDER:
        return REQUESTS in inner
    return not path.name.endswith((".lock", ".tmp"))


def _copy_history(history: Path, snapshot: Path) -> Iterator[FileEntry]:
    for path in sorted(path for path in history.rglob("*") if path.is_file()):
        name = f"{HISTORY}/{path.relative_to(history)}"
        if path.name.endswith(OF_DATABASES):
            continue
        copy = copy_database if path.suffix == DATABASE else copy_file
        yield copy(path, snapshot / name, name)


def _copy_settings(config: Path, snapshot: Path) -> Iterator[FileEntry]:
    for name in (_within(config), *PROJECT_FILES):
        path = Path(name)
        if path.is_file():
            yield copy_file(path, snapshot / SETTINGS / name, f"{SETTINGS}/{name}")


def _copy_artifact(store: Store, name: tuple[str, str], folder: Path) -> bool:
    """Copy an artifact, its manifest last; whether it was still there."""
    place = layout.artifact(*name)
    target = folder / ARTIFACTS / place
    if (target / layout.MANIFEST_NAME).exists():
        return True
    artifact = store.find_named(*name)
    if artifact is None:
        return False
    source = Path(store.root) / place
    try:
        if artifact.manifest.location is None:
            for entry in artifact.manifest.files:
                copy_known(source, target, entry)
        copy_file(source / layout.MANIFEST_NAME, target / layout.MANIFEST_NAME, place)
    except FileNotFoundError:
        if store.exists(*name):
            raise
        return False  # Retention has removed it meanwhile: no record names it.
    return True


def _within(config: Path) -> str:
    """The pipeline file's name relative to the project's folder."""
    path = config.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
