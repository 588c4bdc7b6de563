"""The store: one root folder, local or `gs://`, that holds every artifact.

An artifact is a folder `<kind>/<fingerprint>/` whose `manifest.json` is written last. Without its
manifest an artifact does not exist.
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

from pydantic import ValidationError

from artifacts.errors import DamagedArtifact, LeaseLost, MissingArtifact, UserError, make_command
from artifacts.leases import Lease, ObjectLease, is_held, local_lease, object_is_held, object_lease
from artifacts.libraries import refuse_changes
from artifacts.settings import first_fault
from artifacts.storage import files
from artifacts.storage.files import FileEntry, cache_folder, list_files, make_private
from artifacts.storage.transfer import download_folder, remote_entries, upload_folder
from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.layout import MANIFEST_NAME
from artifacts.store.manifest import (
    REWRITTEN,
    Edition,
    Editions,
    Manifest,
    content_of,
    dump_with_checksum,
    parse_manifest,
    verify_manifest,
)

# An artifact in the making: where its files are written, and how they become an artifact.
# On a local disk every maker writes into a folder of its own,
# `drafts/<kind>-<fingerprint>-<epoch>`, which one rename makes the artifact, manifest inside. Who
# takes over from a maker that seems dead first renames its folder away. So a maker that lost its
# lease, or a program that outlived its maker, has nothing left to commit and no path into what
# others committed.
# Cloud Storage has no rename. There files go to the artifact's own folder, and the manifest is
# written in one step that storage refuses unless the lease is still the maker's.
UPLOADING_NAME = "uploading.json"
"""In the folder of an artifact whose files are just going up: their names."""
REVISION_VARIABLE = "LLM_ASSETS_REVISION"
# What a rename onto a folder with files in it fails with: POSIX leaves open which of the two.
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
        """The manifest that makes this draft an artifact, and the one of the artifact that it is
        already.

        Content that came of the same request before is the artifact that it was then, and other
        content made by the same libraries is a new one; the draft's identity follows.
        """
        identity = self.identity
        self.identity = self.editions.settle(identity, content_of(entries))
        folder = f"{self.root}/{layout.artifact(identity.kind, self.identity.fingerprint)}"
        # Under its own name there is none: the maker looked for it once it had the lease.
        content = files.find(f"{folder}/{MANIFEST_NAME}") if self.identity != identity else None
        by = {"python": platform.python_version(), "revision": code_revision()}
        manifest = Manifest(
            **self.identity.model_dump(),
            fingerprint=self.identity.fingerprint,
            files=entries,
            stats=self.stats,
            provenance=by | self.provenance,
        )
        return manifest, parse_manifest(content, folder) if content else None


def open_draft(root: str, identity: Identity, machine_folder: Path, editions: Editions) -> Draft:
    """A fresh draft; what earlier makers of the same artifact left on this machine goes.

    The caller holds the artifact's lease. In the cloud, what a job wrote into the artifact's folder
    stays: it may be running, about to be found again. Whoever starts a new job clears the folder.
    The machine's folder is the store's root where that is local.
    """
    making = machine_folder / layout.DRAFTS_FOLDER
    name = layout.artifact_lease(identity.kind, identity.fingerprint)
    making.mkdir(parents=True, exist_ok=True)
    # `removed-*` is left where a maker was killed while it removed a folder.
    for leftover in [*making.glob(f"{name}-*"), *making.glob("removed-*")]:
        _discard(leftover, making)
    path = making / f"{name}-{uuid.uuid4().hex[:12]}"
    path.mkdir()
    folder = layout.artifact(identity.kind, identity.fingerprint)
    if files.is_local(root):
        # What lies there without a manifest would be in the way of the rename that commits.
        if not files.exists(f"{root}/{folder}/{MANIFEST_NAME}"):
            _discard(Path(root, folder), making)
        return Draft(identity, root, path, os.fspath(path), editions)
    draft = Draft(identity, root, path, f"{root}/{folder}", editions)
    for left_name in json.loads(files.find(f"{draft.url}/{UPLOADING_NAME}") or b"[]"):
        files.remove(f"{draft.url}/{left_name}")
    return draft


def commit(draft: Draft, lease: Lease) -> Manifest:
    """Make a draft's files an artifact, whole and on the disk itself, or raise LeaseLost."""
    lease.check()
    if isinstance(lease, ObjectLease):
        return _commit_remote(draft, lease)
    return _commit_local(draft, lease)


def _commit_remote(draft: Draft, lease: ObjectLease) -> Manifest:
    names = json.dumps(list(files.list_sizes(draft.path)))
    # First of all: whoever comes after a maker that died here learns what to remove.
    files.write(f"{draft.url}/{UPLOADING_NAME}", names.encode())
    uploads = f"{draft.root}/{layout.UPLOADS_FOLDER}"
    staged = upload_folder(draft.path, draft.url, uploads, before_write=lease.check)
    staged_paths = {UPLOADING_NAME, *(entry.path for entry in staged)}
    # What a job has written into the folder by itself is part of the artifact, too.
    manifest, before = draft.settle(
        staged + [entry for entry in remote_entries(draft.url) if entry.path not in staged_paths]
    )
    folder = f"{draft.root}/{layout.artifact(manifest.kind, manifest.fingerprint)}"
    if before:
        files.remove(draft.url)
    else:
        if folder != draft.url:
            files.move(draft.url, folder)
        lease.commit(f"{folder}/{MANIFEST_NAME}", dump_with_checksum(manifest))
        # Only after the manifest: a maker that dies between the two leaves a whole artifact behind.
        files.remove(f"{folder}/{UPLOADING_NAME}")
    shutil.rmtree(draft.path)
    return before or manifest


def _commit_local(draft: Draft, lease: Lease) -> Manifest:
    entries = list_files(draft.url)
    # Before the manifest is written, which must not name files that a loss of power emptied.
    files.flush_folder(draft.path, [entry.path for entry in entries])
    manifest, before = draft.settle(entries)
    if before:
        shutil.rmtree(draft.path)
        return before
    target = Path(draft.root, layout.artifact(manifest.kind, manifest.fingerprint))
    files.write(draft.path / MANIFEST_NAME, dump_with_checksum(manifest))
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


@functools.cache
def code_revision() -> str:
    """The git commit of this code, with `+changes` where files differ from it.

    An image without a git checkout names its revision in `LLM_ASSETS_REVISION`; without either the
    answer is `unknown`.
    """
    if revision := os.environ.get(REVISION_VARIABLE):
        return revision
    # Without tags, of which a release has some: the commit alone names the code.
    describe = ("git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes")
    try:
        process = subprocess.run(
            describe,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return process.stdout.strip()


@dataclass(frozen=True)
class Artifact:
    """An artifact that exists."""

    store: "Store"
    manifest: Manifest

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    @property
    def stats(self) -> dict[str, Any]:
        return self.manifest.stats

    @property
    def url(self) -> str:
        """The folder that holds the files; a plain path for a local store."""
        return self.store.folder_url(self.manifest.kind, self.manifest.fingerprint)

    @property
    def path(self) -> Path:
        """A local folder with the files; from a store in the cloud they are fetched once."""
        if self.store.is_local:
            return Path(self.url)
        folder = cache_folder() / "artifacts" / self.url.removeprefix("gs://")
        # Who fetched it again would cut the files that another process reads.
        with local_lease(folder.with_name(f"{folder.name}.lock")):
            manifest = dump_with_checksum(self.manifest)
            # Another machine may have rewritten the artifact (`artifacts.store.rewrite`).
            if files.find(folder / MANIFEST_NAME) != manifest:
                download_folder(self.url, self.manifest.files, folder)
                # Last, as in the store: a copy without it is fetched again.
                (folder / MANIFEST_NAME).write_bytes(manifest)
        return folder

    def verify(self, checksums: bool = True) -> None:
        """Compare every file with the manifest; raises DamagedArtifact where one is absent, or its
        size or checksum differs."""
        verify_manifest(self.manifest, self.url, checksums=checksums)


class Store:
    """Reads and writes artifacts under one root."""

    def __init__(self, root: str) -> None:
        self.filesystem, path = files.resolve(root)
        self.is_local = files.is_local(root)
        self.root = os.path.abspath(path) if self.is_local else root.rstrip("/")

    def folder_url(self, kind: str, fingerprint: str) -> str:
        """Where an artifact's files are, whether or not it exists."""
        return f"{self.root}/{layout.artifact(kind, fingerprint)}"

    def local_path(self, url: str) -> Path:
        """A folder of this store as a local path; raises UserError where it is not local."""
        if "://" in url:
            raise UserError(f"{url} is not on this machine: this step needs a local store.")
        return Path(url)

    @property
    def cache(self) -> str:
        """The folder of what later runs need not make again (`artifacts.cache`)."""
        return f"{self.root}/{layout.CACHE_FOLDER}"

    @property
    def machine_cache(self) -> str:
        """The same for what is made on this machine alone; on its own disk."""
        return self.cache if self.is_local else str(self.machine_root)

    @property
    def machine_root(self) -> Path:
        """A folder of this machine that is this store's own; a local store's root."""
        if self.is_local:
            return Path(self.root)
        return cache_folder() / "work" / self.root.removeprefix("gs://")

    def find(self, identity: Identity) -> Artifact | None:
        """The artifact of this identity, or what its libraries were found to make as well; None
        where neither exists."""
        editions = self.editions(identity).editions
        fingerprints = [
            edition.fingerprint for edition in editions if edition.libraries == identity.libraries
        ]
        # First what these libraries are on record as having made, newest first. Last the identity's
        # own name: its maker may have been killed before it was recorded, and a backup may hold it
        # with an older record.
        names = (*reversed(fingerprints), identity.fingerprint)
        return next(filter(None, (self.find_named(identity.kind, name) for name in names)), None)

    def editions(self, identity: Identity) -> Editions:
        """All editions of what an identity asks for; raises DamagedArtifact."""
        return self.read_editions(layout.editions(identity.kind, identity.asked))

    def read_editions(self, place: str) -> Editions:
        """A record of editions, empty where there is none; raises DamagedArtifact."""
        return self._parse_editions(self.read_bytes(place), place)

    def _parse_editions(self, content: bytes | None, place: str) -> Editions:
        try:
            return Editions.model_validate_json(content) if content is not None else Editions()
        except ValidationError as error:
            raise DamagedArtifact(
                f"{self.root}/{place} cannot be read ({first_fault(error)}). Set it aside "
                "with: llm-assets doctor --repair"
            ) from None

    def names(self, identity: Identity) -> list[str]:
        """Fingerprints of all editions of what an identity asks for, newest first, existing or not.

        Its own are included, for a store whose record of editions a backup took away.
        """
        editions = self.editions(identity).editions
        # The second is that of artifacts from before libraries were recorded.
        own_names = (identity.fingerprint, identity.asked)
        return list(
            dict.fromkeys([*(edition.fingerprint for edition in reversed(editions)), *own_names])
        )

    def enter(self, artifact: Artifact, libraries: dict[str, str], compared: str = "") -> None:
        """Record what libraries made or, with `compared`, were found to make as well."""
        manifest = artifact.manifest
        place = layout.editions(manifest.kind, manifest.identity.asked)

        def note(content: bytes | None) -> bytes | None:
            record = self._parse_editions(content, place)
            known_keys = [(edition.fingerprint, edition.libraries) for edition in record.editions]
            # What was rewritten is not what the libraries made, and must not be taken for it.
            own = Edition(
                libraries=manifest.libraries,
                fingerprint=artifact.fingerprint,
                remade=manifest.remade,
                content="" if REWRITTEN in manifest.provenance else content_of(manifest.files),
            )
            new = [own]
            if libraries != manifest.libraries:
                update = {"libraries": libraries, "compared": compared}
                new.append(own.model_copy(update=update))
            new = [
                edition
                for edition in new
                if (edition.fingerprint, edition.libraries) not in known_keys
            ]
            if not new:
                return None
            record.editions += new
            return record.model_dump_json(indent=2).encode()

        self.update(place, note)

    def exists(self, kind: str, fingerprint: str) -> bool:
        """Whether there is an artifact of this name."""
        return files.exists(f"{self.root}/{layout.manifest(kind, fingerprint)}")

    def find_named(self, kind: str, fingerprint: str) -> Artifact | None:
        """The artifact of this name, or None where it does not exist."""
        content = self.read_bytes(layout.manifest(kind, fingerprint))
        if content is None:
            return None
        return Artifact(self, parse_manifest(content, self.folder_url(kind, fingerprint)))

    def load(self, kind: str, fingerprint: str, needed_by: str | None = None) -> Artifact:
        """Read an artifact by name; raises MissingArtifact where it does not exist."""
        artifact = self.find_named(kind, fingerprint)
        if artifact is None:
            raise MissingArtifact(
                f"The store {self.root} has no {kind} {fingerprint} (no "
                f"{layout.manifest(kind, fingerprint)}). Make it with: "
                f"{make_command(needed_by or kind)}"
            )
        return artifact

    def make(
        self,
        identity: Identity,
        build: Callable[[Draft], None],
        on_wait: Callable[[str], None] | None = None,
    ) -> tuple[Artifact, bool]:
        """Make an artifact unless it exists: `(artifact, made)`.

        `build` writes files under `draft.url` or `draft.path` and fills `draft.stats`; the manifest
        is written after it returns. Two makers of the same artifact wait for each other, and the
        second finds it made (`artifacts.store.store` has how they are kept apart). What comes out
        is the artifact of another identity where its content is (`artifacts.store.manifest`).
        Raises LeaseLost where another has taken over, since this machine slept or was cut off, and
        UserError where a library was upgraded meanwhile.
        """
        existing = self.find(identity)
        if existing:
            self.enter(existing, identity.libraries)
            return existing, False
        name = layout.artifact_lease(identity.kind, identity.fingerprint)
        with self.lease(name, on_wait) as lease:
            # Whoever held the lease before may have made it, and entered it, while we waited.
            existing = self.find(identity)
            if existing:
                return existing, False
            draft = open_draft(self.root, identity, self.machine_root, self.editions(identity))
            # On record as long as it is being made, since its inputs are in use (`in_the_making`).
            # The record has the name of the lease, by which a maker that died is noticed.
            place = f"{layout.MAKING_FOLDER}/{identity.kind}-{identity.fingerprint}.json"
            self.write_bytes(place, identity.model_dump_json().encode())
            try:
                build(draft)
                # A library that was upgraded in the middle would be named by the version before.
                refuse_changes(identity.libraries)
            except Exception:
                # Where another has taken over, that is why building failed.
                lease.check()
                raise
            finally:
                files.remove(f"{self.root}/{place}")
            artifact = Artifact(self, commit(draft, lease))
            # If the content is that of an earlier edition, these libraries are recorded as making
            # it, too.
            self.enter(artifact, identity.libraries, "all files")
            return artifact, True

    def in_the_making(self) -> list[Identity]:
        """What is being made just now, by whomever: its inputs are in use."""
        identities = []
        for name in self.list_folder(layout.MAKING_FOLDER):
            content = self.read_bytes(f"{layout.MAKING_FOLDER}/{name}")
            if content and self.is_leased(name.removesuffix(".json")):
                identities.append(Identity.model_validate_json(content))
        return identities

    def is_leased(self, name: str) -> bool:
        """Whether somebody holds the store's lease of this name."""
        path = f"{self.root}/{layout.lease(name)}"
        return is_held(Path(path)) if self.is_local else object_is_held(path)

    def lease(
        self, name: str, on_wait: Callable[[str], None] | None = None
    ) -> contextlib.AbstractContextManager[Lease]:
        """Hold the store's lease of this name while the block runs."""
        path = f"{self.root}/{layout.lease(name)}"
        if not self.is_local:
            return object_lease(path, on_wait)
        make_private(Path(self.root))
        return local_lease(Path(path), on_wait)

    def list_folder(self, path: str) -> list[str]:
        """The names in a folder relative to the root; empty where there is none."""
        return files.list_names(f"{self.root}/{path}")

    def read_bytes(self, path: str) -> bytes | None:
        """A small file at a path relative to the root, or None where there is none."""
        return files.find(f"{self.root}/{path}")

    def has_file(self, path: str) -> bool:
        """Whether there is a file at a path relative to the root."""
        return files.exists(f"{self.root}/{path}")

    def write_bytes(self, path: str, content: bytes) -> None:
        """Write a small file at a path relative to the root, whole or not at all."""
        if self.is_local:
            make_private(Path(self.root))
        files.write(f"{self.root}/{path}", content)

    def update(self, path: str, change: Callable[[bytes | None], bytes | None]) -> None:
        """Change a small file as one step, so that of two who change it at once both are heard.

        `change` gets the content, None where there is none, and gives the new one, None where
        nothing is to change. In the cloud it may be asked again.
        """
        if self.is_local:
            with self.lease(path.replace("/", "-")):
                content = change(self.read_bytes(path))
                if content is not None:
                    self.write_bytes(path, content)
            return
        blob = files.blob_of(f"{self.root}/{path}")
        while True:
            before, generation = files.read_generation(blob)
            content = change(before)
            if content is None or files.write_generation(blob, content, generation) is not None:
                return

    def set_aside(self, place: str) -> None:
        """Move a file or folder, named relative to the root, to `damaged/`, in place of what was
        moved there before. An artifact no longer exists as one."""
        source, target = f"{self.root}/{place}", f"{self.root}/{layout.damaged(place)}"
        # Of an artifact, that is the lease that its maker holds (`layout.artifact_lease`).
        with self.lease(place.replace("/", "-")):
            if files.exists(source):
                files.remove(target)
                files.move(source, target)
                # Cleaning counts the days from now; in a bucket, what is moved is written.
                for path in (Path(target), *Path(target).rglob("*")) if self.is_local else ():
                    # Files of another user keep their times.
                    with contextlib.suppress(PermissionError):
                        os.utime(path, follow_symlinks=False)
