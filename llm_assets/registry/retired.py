"""What stays of artifacts that were removed, so that registered versions still explain themselves.

Under `retired/<kind>/<fingerprint>/` lies `manifest.json`, without the list of files, and of a
checkpoint the records of the text that it and its lineage were trained on.
"""

from artifacts.store import layout
from artifacts.store.manifest import Manifest, dump_manifest, parse_manifest
from artifacts.store.store import Store
from recipes.data.seen import SEEN_NAME
from recipes.data.trained import TRAINED_NAME


def retire(store: Store, manifest: Manifest) -> None:
    """Keep what a manifest says of an artifact that is about to be removed."""
    kind, fingerprint = manifest.kind, manifest.fingerprint
    place = layout.retired(kind, fingerprint)
    for name in (TRAINED_NAME, SEEN_NAME):
        record = store.read_bytes(f"{layout.artifact(kind, fingerprint)}/{name}")
        if record is not None:
            store.write_bytes(f"{place}/{name}", record)
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


def find_record(store: Store, checkpoint: str, name: str) -> str | None:
    """URL of a record of a checkpoint's text, be it still there or removed; None where neither."""
    folders = (layout.artifact("checkpoint", checkpoint), layout.retired("checkpoint", checkpoint))
    places = (f"{folder}/{name}" for folder in folders)
    return next((f"{store.root}/{place}" for place in places if store.has_file(place)), None)
