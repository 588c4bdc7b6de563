"""Files of an artifact written again under its name, where something must not stay in the store.

This is the one exception to "an artifact never changes", and keeps the other promise: nothing
half-written is ever read. While its files change the artifact has no `manifest.json`; what it said
waits in `manifest.before.json`. Killed and called again, rewriting goes on from there.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from artifacts.storage import files
from artifacts.storage.files import FileEntry, sha256_of
from artifacts.storage.transfer import remote_entries
from artifacts.store import layout
from artifacts.store.manifest import REWRITTEN, Manifest, dump_with_checksum, parse_manifest
from artifacts.store.store import Artifact, Store

BEFORE_NAME = "manifest.before.json"


def find_rewritable(store: Store, kind: str, fingerprint: str) -> Artifact | None:
    """An artifact, also one whose rewriting was interrupted; None where there is none."""
    artifact = store.find_named(kind, fingerprint)
    if artifact:
        return artifact
    folder = layout.artifact(kind, fingerprint)
    content = store.read_bytes(f"{folder}/{BEFORE_NAME}")
    return Artifact(store, parse_manifest(content, f"{store.root}/{folder}")) if content else None


def rewrite(
    artifact: Artifact,
    contents: Iterable[tuple[str, bytes]],
    stats: dict[str, Any],
    reason: str,
) -> list[str]:
    """Put other contents into files of an artifact (`find_rewritable`), under its lease; returns
    the paths of those that were written.

    Contents are a path in the artifact's folder and the file's new content, one at a time; without
    any, and with unchanged stats, nothing happens.
    """
    store, before = artifact.store, artifact.manifest
    folder = layout.artifact(before.kind, before.fingerprint)
    paths: list[str] = []
    with store.lease(layout.artifact_lease(before.kind, before.fingerprint)):
        resumed = not store.exists(before.kind, before.fingerprint)
        for path, content in contents:
            # Before the first byte changes, and not at all where nothing is to change.
            _set_aside(store, before)
            files.write(f"{artifact.url}/{path}", content)
            paths.append(path)
        if not (paths or resumed or stats != before.stats):
            return []
        _set_aside(store, before)
        # An interrupted rewriting may have changed any file.
        changed = {entry.path for entry in before.files} if resumed else set(paths)
        rewritten = before.provenance.get(REWRITTEN, [])
        note = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "reason": reason}
        after = before.model_copy(
            update={
                "files": _entries(artifact, changed),
                "stats": stats,
                "provenance": before.provenance | {REWRITTEN: [*rewritten, note]},
            }
        )
        store.write_bytes(f"{folder}/{layout.MANIFEST_NAME}", dump_with_checksum(after))
        # Last: as long as both are there, the manifest counts.
        files.remove(f"{store.root}/{folder}/{BEFORE_NAME}")
    return paths


def _set_aside(store: Store, before: Manifest) -> None:
    folder = layout.artifact(before.kind, before.fingerprint)
    if store.exists(before.kind, before.fingerprint):
        store.write_bytes(f"{folder}/{BEFORE_NAME}", dump_with_checksum(before))
        # Only once the copy is written, so that one of the two is there at any time.
        files.remove(f"{store.root}/{folder}/{layout.MANIFEST_NAME}")


def _entries(artifact: Artifact, changed: set[str]) -> list[FileEntry]:
    """The artifact's files, those that may have changed as they are now."""
    url = artifact.url
    if artifact.store.is_local:
        urls = {path: f"{url}/{path}" for path in changed}
        current = [
            FileEntry(path=path, bytes=files.size(place), sha256=sha256_of(place))
            for path, place in urls.items()
        ]
    else:
        current = [entry for entry in remote_entries(url) if entry.path in changed]
    by_path = {entry.path: entry for entry in current}
    return [by_path.get(entry.path, entry) for entry in artifact.manifest.files]
