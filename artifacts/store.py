"""The store: one root folder, local or `gs://`, that holds every artifact.

An artifact is a folder `<kind>/<fingerprint>/` whose `manifest.json` is written last. Without its
manifest an artifact does not exist.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from pydantic import ValidationError

from artifacts.atomic import write_atomically
from artifacts.errors import DamagedArtifact, MissingArtifact, UserError
from artifacts.files import list_files, sha256_of
from artifacts.identity import Identity
from artifacts.lease import local_lease
from artifacts.manifest import MANIFEST_NAME, FileEntry, Manifest
from artifacts.object_lease import object_lease
from artifacts.provenance import provenance
from artifacts.transfer import download_folder, remote_entries, upload_folder

UPLOADING_NAME = "uploading.json"
"""In the folder of an artifact whose files are just going up: their names."""

CACHE_VARIABLE = "LLM_ASSETS_CACHE"
"""Where files of a store in the cloud are kept on this machine; `~/.cache/llm_assets` if absent."""


@dataclass
class Draft:
    """An artifact in the making: write files under `url`, fill `stats`, and return."""

    store: "Store"
    identity: Identity
    stats: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The folder to write into; a plain path for a local store."""
        return self.store.folder_url(self.identity.kind, self.identity.fingerprint)

    @property
    def path(self) -> Path:
        """A local folder to write into; from there files go up to a store in the cloud."""
        return self.store.staging_folder(self.url)


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
        return self.manifest.location or self.store.folder_url(
            self.manifest.kind, self.manifest.fingerprint
        )

    @property
    def path(self) -> Path:
        """A local folder with the files; from a store in the cloud they are fetched once."""
        return self.store.local_copy(self)

    def verify(self, checksums: bool = True) -> None:
        """Compare every file with the manifest.

        Raises:
            DamagedArtifact: a file is absent, or its size or checksum differs.
        """
        filesystem, folder = fsspec.core.url_to_fs(self.url)
        for entry in self.manifest.files:
            path = f"{folder}/{entry.path}"
            if not filesystem.exists(path):
                raise DamagedArtifact(self._damage(entry, "is absent"))
            size = filesystem.size(path)
            if size != entry.bytes:
                raise DamagedArtifact(self._damage(entry, f"has {size} bytes, not {entry.bytes}"))
            if checksums and not _matches(filesystem, path, entry):
                raise DamagedArtifact(self._damage(entry, "has another checksum than its manifest"))

    def _damage(self, entry: FileEntry, fault: str) -> str:
        return (
            f"{self.url}/{entry.path} {fault}. Delete the folder {self.url} and materialize "
            f"`{self.manifest.kind}` again: it is made anew from its inputs."
        )


class Store:
    """Reads and writes artifacts under one root."""

    def __init__(self, root: str) -> None:
        self.filesystem, path = fsspec.core.url_to_fs(root)
        self.is_local = isinstance(self.filesystem, LocalFileSystem)
        self.root = os.path.abspath(path) if self.is_local else f"{root.rstrip('/')}"

    def folder_url(self, kind: str, fingerprint: str) -> str:
        """Where an artifact's files are, whether or not it exists."""
        return f"{self.root}/{kind}/{fingerprint}"

    def local_path(self, url: str) -> Path:
        """A folder of this store as a local path; raises UserError where it is not local."""
        if "://" in url:
            raise UserError(f"{url} is not on this machine: this step needs a local store.")
        return Path(url)

    def staging_folder(self, url: str) -> Path:
        """Where this machine writes the files of an artifact in the making."""
        if self.is_local:
            return Path(url)
        folder = _cache_folder() / "staging" / url.removeprefix("gs://")
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def machine_folder(self, name: str) -> Path:
        """Where this machine keeps what speeds up its next run; a folder of a local store."""
        if self.is_local:
            return Path(self.root) / "cache" / name
        return _cache_folder() / "work" / self.root.removeprefix("gs://") / name

    def local_copy(self, artifact: Artifact) -> Path:
        """The folder of an artifact's files on this machine, fetched where it is in the cloud."""
        if "://" not in artifact.url:
            return Path(artifact.url)
        folder = _cache_folder() / "artifacts" / artifact.url.removeprefix("gs://")
        if not (folder / MANIFEST_NAME).exists():
            download_folder(artifact.url, artifact.manifest.files, folder)
            (folder / MANIFEST_NAME).write_text(artifact.manifest.model_dump_json())
        return folder

    def find(self, identity: Identity) -> Artifact | None:
        """The artifact of this identity, or None where it does not exist."""
        return self._read(identity.kind, identity.fingerprint)

    def exists(self, kind: str, fingerprint: str) -> bool:
        """Whether there is an artifact of this name."""
        self.filesystem.invalidate_cache()
        return bool(self.filesystem.exists(f"{self.folder_url(kind, fingerprint)}/{MANIFEST_NAME}"))

    def load(self, kind: str, fingerprint: str) -> Artifact:
        """Read an artifact by name; raises MissingArtifact where it does not exist."""
        artifact = self._read(kind, fingerprint)
        if artifact is None:
            raise MissingArtifact(
                f"The store {self.root} has no {kind} {fingerprint} (no "
                f"{kind}/{fingerprint}/{MANIFEST_NAME}). Make it with: "
                f'dagster asset materialize --select "*{kind}"'
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
        is written after it returns. What an earlier, interrupted maker left in the folder is
        removed first. Two makers of the same artifact wait for each other, and the second finds it
        made.
        """
        existing = self.find(identity)
        if existing:
            return existing, False
        with self.lease(f"{identity.kind}-{identity.fingerprint}", on_wait):
            existing = self.find(identity)
            if existing:
                return existing, False
            draft = Draft(self, identity)
            self._clear(draft.url)
            build(draft)
            return self._commit(draft), True

    def adopt(
        self, identity: Identity, location: str, stats: dict[str, Any], provenance: dict[str, Any]
    ) -> Artifact:
        """Enter what was made elsewhere: a manifest that points there, nothing copied."""
        filesystem, folder = fsspec.core.url_to_fs(location)
        is_remote = location.startswith("gs://")
        files = remote_entries(location) if is_remote else list_files(filesystem, folder)
        if not files:
            raise UserError(f"{location} holds no files to adopt as {identity.kind}.")
        manifest = Manifest(
            **identity.model_dump(),
            fingerprint=identity.fingerprint,
            files=files,
            stats=stats,
            provenance=provenance,
            location=location,
        )
        self._write_manifest(manifest)
        return Artifact(self, manifest)

    @contextlib.contextmanager
    def lease(self, name: str, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
        """Hold the store's lease of this name while the block runs."""
        path = f"{self.root}/leases/{name}.lock"
        with local_lease(Path(path), on_wait) if self.is_local else object_lease(path, on_wait):
            yield

    def read_bytes(self, path: str) -> bytes | None:
        """A small file at a path relative to the root, or None where there is none."""
        try:
            return bytes(self.filesystem.cat_file(f"{self.root}/{path}"))
        except FileNotFoundError:
            return None

    def write_bytes(self, path: str, content: bytes) -> None:
        """Write a small file at a path relative to the root, whole or not at all."""
        write_atomically(self.filesystem, f"{self.root}/{path}", content)

    def _read(self, kind: str, fingerprint: str) -> Artifact | None:
        content = self.read_bytes(f"{kind}/{fingerprint}/{MANIFEST_NAME}")
        if content is None:
            return None
        try:
            return Artifact(self, Manifest.model_validate_json(content))
        except ValidationError as error:
            raise DamagedArtifact(
                f"{self.folder_url(kind, fingerprint)}/{MANIFEST_NAME} cannot be read "
                f"({error.error_count()} faults, the first: {error.errors()[0]['msg']}). "
                f"Delete the folder and materialize `{kind}` again."
            ) from error

    def _clear(self, url: str) -> None:
        """Remove what an interrupted maker on this machine left.

        In the cloud, a job may be writing there, which is about to be found again: what it wrote
        stays, and whoever starts a new job removes it (`clear_folder`).
        """
        if self.is_local:
            shutil.rmtree(url, ignore_errors=True)
            os.makedirs(url, exist_ok=True)
            return
        shutil.rmtree(self.staging_folder(url))
        names = self.read_bytes(f"{url.removeprefix(self.root + '/')}/{UPLOADING_NAME}")
        for name in json.loads(names) if names else ():
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.rm(f"{url}/{name}")

    def _collect(self, draft: Draft) -> list[FileEntry]:
        """The files of a draft, after what was written on this machine has gone up."""
        if self.is_local:
            return list_files(self.filesystem, draft.url)
        names = [p.relative_to(draft.path).as_posix() for p in draft.path.rglob("*") if p.is_file()]
        self.filesystem.pipe_file(f"{draft.url}/{UPLOADING_NAME}", json.dumps(names).encode())
        staged = upload_folder(draft.path, draft.url, f"{self.root}/uploads")
        sent = {UPLOADING_NAME, *(entry.path for entry in staged)}
        return staged + [e for e in remote_entries(draft.url) if e.path not in sent]

    def _commit(self, draft: Draft) -> Artifact:
        manifest = Manifest(
            **draft.identity.model_dump(),
            fingerprint=draft.identity.fingerprint,
            files=self._collect(draft),
            stats=draft.stats,
            provenance=provenance() | draft.provenance,
        )
        self._write_manifest(manifest)
        if not self.is_local:
            self.filesystem.rm(f"{draft.url}/{UPLOADING_NAME}")
            shutil.rmtree(draft.path)
        return Artifact(self, manifest)

    def _write_manifest(self, manifest: Manifest) -> None:
        path = f"{manifest.kind}/{manifest.fingerprint}/{MANIFEST_NAME}"
        content = manifest.model_dump_json(indent=2).encode()
        if self.is_local:
            self.write_bytes(path, content)
            return
        # Storage itself refuses a second manifest, should a lease ever have been lost.
        with contextlib.suppress(FileExistsError):
            self.filesystem.pipe_file(f"{self.root}/{path}", content, mode="create")


def clear_folder(url: str) -> None:
    """Remove everything in a folder of a store, if there is anything."""
    filesystem, folder = fsspec.core.url_to_fs(url)
    filesystem.invalidate_cache()
    if filesystem.exists(folder):
        filesystem.rm(folder, recursive=True)


def _matches(filesystem: fsspec.AbstractFileSystem, path: str, entry: FileEntry) -> bool:
    """Whether a file is the one of its entry; storage's own checksum is used where there is one."""
    if entry.crc32c is not None and entry.sha256 is None:
        return bool(filesystem.info(path)["crc32c"] == entry.crc32c)
    return sha256_of(filesystem, path) == entry.sha256


def _cache_folder() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "llm_assets")
