"""An artifact in the making: where its files are written, and how they become an artifact.

On a local disk every maker writes into a folder of its own, `drafts/<kind>-<fingerprint>-<epoch>`,
which one rename makes the artifact, manifest inside. Who takes over from a maker that seems dead
first renames its folder away. So a maker that lost its lease, or a program that outlived its maker,
has nothing left to commit and no path into what others committed.

Cloud Storage has no rename. There files go to the artifact's own folder, and the manifest is
written in one step that storage refuses unless the lease is still the maker's.
"""

import contextlib
import errno
import functools
import json
import os
import platform
import shutil
import subprocess
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artifacts.errors import LeaseLost
from artifacts.leases import Lease, ObjectLease
from artifacts.storage import files
from artifacts.storage.files import FileEntry, list_files
from artifacts.storage.transfer import remote_entries, upload_folder
from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.manifest import Editions, Manifest, content_of, parse_manifest

UPLOADING_NAME = "uploading.json"
"""In the folder of an artifact whose files are just going up: their names."""
REVISION_VARIABLE = "LLM_ASSETS_REVISION"
TAKEN = (errno.EEXIST, errno.ENOTEMPTY)


@dataclass
class Draft:
    """Write files under `url` or `path`, fill `stats`, and return."""

    identity: Identity
    root: str
    """Of the store."""
    path: Path
    """A local folder to write into; from there files go up to a store in the cloud."""
    url: str
    """The folder that programs elsewhere write into; a plain path, `path`, for a local store."""
    editions: Editions
    """What came before of what the identity asks for."""
    stats: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def settle(self, entries: list[FileEntry]) -> tuple[Manifest, Manifest | None]:
        """What makes this draft, with these files, an artifact; and what there is already of it.

        Content that came of the same before is the artifact that it was then, and other content of
        the same libraries is another one: the draft's identity follows.
        """
        asked = self.identity
        self.identity = self.editions.settle(asked, content_of(entries))
        folder = f"{self.root}/{layout.artifact(asked.kind, self.identity.fingerprint)}"
        content = files.find(f"{folder}/{layout.MANIFEST_NAME}") if self.identity != asked else None
        return self._manifest(entries), parse_manifest(content, folder) if content else None

    def _manifest(self, entries: list[FileEntry]) -> Manifest:
        return Manifest(
            **self.identity.model_dump(),
            fingerprint=self.identity.fingerprint,
            files=entries,
            stats=self.stats,
            provenance=provenance() | self.provenance,
        )


def open_draft(root: str, identity: Identity, machine_folder: Path, editions: Editions) -> Draft:
    """A fresh draft; what earlier makers of the same artifact left on this machine goes.

    The caller holds the artifact's lease. In the cloud, what a job wrote into the artifact's folder
    stays: it may be running, about to be found again. Whoever starts a new job clears the folder.

    Args:
        machine_folder: a folder of this machine; the store's root where that is local.
        editions: of the identity.
    """
    making = machine_folder / layout.DRAFTS_FOLDER
    name = layout.artifact_lease(identity.kind, identity.fingerprint)
    making.mkdir(parents=True, exist_ok=True)
    for left in [*making.glob(f"{name}-*"), *making.glob("removed-*")]:
        _discard(left, making)
    path = making / f"{name}-{uuid.uuid4().hex[:12]}"
    path.mkdir()
    folder = layout.artifact(identity.kind, identity.fingerprint)
    if files.is_local(root):
        if not files.exists(f"{root}/{folder}/{layout.MANIFEST_NAME}"):
            _discard(Path(root, folder), making)
        return Draft(identity, root, path, os.fspath(path), editions)
    draft = Draft(identity, root, path, f"{root}/{folder}", editions)
    for left_name in json.loads(files.find(f"{draft.url}/{UPLOADING_NAME}") or b"[]"):
        files.remove(f"{draft.url}/{left_name}")
    return draft


def commit(draft: Draft, lease: Lease, dump: Callable[[Manifest], bytes]) -> Manifest:
    """Make a draft's files an artifact, whole and on the disk itself, or raise LeaseLost."""
    lease.check()
    if isinstance(lease, ObjectLease):
        return _commit_remote(draft, lease, dump)
    return _commit_local(draft, lease, dump)


def _commit_remote(draft: Draft, lease: ObjectLease, dump: Callable[[Manifest], bytes]) -> Manifest:
    names = [p.relative_to(draft.path).as_posix() for p in draft.path.rglob("*") if p.is_file()]
    # First of all: whoever comes after a maker that died here learns what to remove.
    files.write(f"{draft.url}/{UPLOADING_NAME}", json.dumps(names).encode())
    uploads = f"{draft.root}/{layout.UPLOADS_FOLDER}"
    staged = upload_folder(draft.path, draft.url, uploads, before_write=lease.check)
    sent = {UPLOADING_NAME, *(entry.path for entry in staged)}
    manifest, before = draft.settle(
        staged + [entry for entry in remote_entries(draft.url) if entry.path not in sent]
    )
    folder = f"{draft.root}/{layout.artifact(manifest.kind, manifest.fingerprint)}"
    if before:
        files.remove(draft.url)
    elif folder != draft.url:
        files.move(draft.url, folder)
    if before is None:
        lease.commit(f"{folder}/{layout.MANIFEST_NAME}", dump(manifest))
        files.remove(f"{folder}/{UPLOADING_NAME}")
    shutil.rmtree(draft.path)
    return before or manifest


def _commit_local(draft: Draft, lease: Lease, dump: Callable[[Manifest], bytes]) -> Manifest:
    entries = list_files(draft.url)
    # Before the manifest is written, which must not name files that a loss of power emptied.
    files.flush_folder(draft.path, [entry.path for entry in entries])
    manifest, before = draft.settle(entries)
    if before:
        shutil.rmtree(draft.path)
        return before
    target = Path(draft.root, layout.artifact(manifest.kind, manifest.fingerprint))
    files.write(draft.path / layout.MANIFEST_NAME, dump(manifest))
    target.parent.mkdir(exist_ok=True)
    lease.check()
    try:
        # The step that makes it exist. Who took over has renamed our draft away (`_discard`).
        os.rename(draft.path, target)
    except OSError as error:
        if error.errno in TAKEN or isinstance(error, FileNotFoundError):
            raise LeaseLost(f"{target} is being made, or was made, by another maker.") from error
        raise
    # The new name is an entry of these folders, which reach the disk by themselves only later.
    files.flush(target.parent)
    files.flush(target.parent.parent)
    return manifest


def _discard(folder: Path, making: Path) -> None:
    """Remove a folder whose maker may still be there, so that it notices at once."""
    removed = making / f"removed-{uuid.uuid4().hex[:12]}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)


def provenance() -> dict[str, str]:
    """Python's version and the revision of this code."""
    return {"python": platform.python_version(), "revision": code_revision()}


@functools.cache
def code_revision() -> str:
    """The git commit of this code, with `+changes` where files differ from it.

    An image without a git checkout names its revision in `LLM_ASSETS_REVISION`; without either the
    answer is `unknown`.
    """
    if named := os.environ.get(REVISION_VARIABLE):
        return named
    commit = _git("rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    return f"{commit}+changes" if _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str | None:
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
