"""Manifests of artifacts that were removed, so that registered versions still explain themselves.

They lie under `retired/<kind>/<fingerprint>/manifest.json`, without the list of files.
"""

from artifacts.store.layout import MANIFEST_NAME
from artifacts.store.manifest import Manifest, dump_manifest, parse_manifest
from artifacts.store.store import Store

RETIRED_FOLDER = "retired"


def retire(store: Store, manifest: Manifest) -> None:
    """Keep what a manifest says of an artifact that is about to be removed."""
    content = dump_manifest(manifest.model_copy(update={"files": []}))
    store.write_bytes(_place(manifest.kind, manifest.fingerprint), content)


def find_manifest(store: Store, kind: str, fingerprint: str) -> Manifest | None:
    """The manifest of an artifact, be it still there or removed; None where neither."""
    artifact = store.find_named(kind, fingerprint)
    if artifact:
        return artifact.manifest
    content = store.read_bytes(_place(kind, fingerprint))
    if content is None:
        return None
    return parse_manifest(content, f"{store.root}/{RETIRED_FOLDER}/{kind}/{fingerprint}")


def _place(kind: str, fingerprint: str) -> str:
    return f"{RETIRED_FOLDER}/{kind}/{fingerprint}/{MANIFEST_NAME}"
