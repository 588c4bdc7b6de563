"""What stays of artifacts that were removed, so that registered versions still explain themselves.

Under `retired/<kind>/<fingerprint>/` lies `manifest.json`, without the list of files, and of a
checkpoint the record of the text that it was trained on.
"""

from artifacts.store import layout
from artifacts.store.manifest import Manifest, dump_manifest, parse_manifest
from artifacts.store.store import Store
from recipes.data.trained import TRAINED_NAME


def retire(store: Store, manifest: Manifest) -> None:
    """Keep what a manifest says of an artifact that is about to be removed."""
    kind, fingerprint = manifest.kind, manifest.fingerprint
    place = layout.retired(kind, fingerprint)
    trained = store.read_bytes(f"{layout.artifact(kind, fingerprint)}/{TRAINED_NAME}")
    if trained is not None:
        store.write_bytes(f"{place}/{TRAINED_NAME}", trained)
    content = dump_manifest(manifest.model_copy(update={"files": []}))
    store.write_bytes(f"{place}/{layout.MANIFEST_NAME}", content)


def find_manifest(store: Store, kind: str, fingerprint: str) -> Manifest | None:
    """The manifest of an artifact, be it still there or removed; None where neither."""
    artifact = store.find_named(kind, fingerprint)
    if artifact:
        return artifact.manifest
    place = layout.retired(kind, fingerprint)
    content = store.read_bytes(f"{place}/{layout.MANIFEST_NAME}")
    return None if content is None else parse_manifest(content, f"{store.root}/{place}")
