"""Which weights a training that continues from the champion starts with; records of removed
artifacts.

`retired/<kind>/<fingerprint>/` contains `manifest.json`, without the list of files and without the
first words of documents, which may be forgotten later, and for a checkpoint also the records of the
text that it and its lineage were trained on. So registered versions still explain themselves when
artifacts are gone.
"""

from datetime import UTC, datetime

from artifacts.errors import UserError
from artifacts.storage import files
from artifacts.store import layout
from artifacts.store.identity import Identity
from artifacts.store.manifest import Manifest, dump_with_checksum, parse_manifest
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.registry.base import Registry
from llm_assets.registry.state import ModelVersion
from recipes.data.records import SEEN_NAME, TRAINED_NAME
from recipes.evaluation.settings import ModelSource

REMOVED = "removed"
"""Key in the provenance of a retired manifest: when its artifact was removed, and by what."""
EXAMPLES = "dropped_examples"
"""Key in the stats of a corpus: the first words of some dropped documents."""


def retire(store: Store, manifest: Manifest, by: str) -> None:
    """Keep the manifest of an artifact that is about to be removed, with the reason in `by`."""
    kind, fingerprint = manifest.kind, manifest.fingerprint
    place = layout.retired(kind, fingerprint)
    for name in (TRAINED_NAME, SEEN_NAME):
        record = store.read_bytes(f"{layout.artifact(kind, fingerprint)}/{name}")
        if record is not None:
            store.write_bytes(f"{place}/{name}", record)
    removed = {REMOVED: {"at": datetime.now(UTC).isoformat(), "by": by}}
    update = {"files": [], "provenance": manifest.provenance | removed}
    _write_retired(store, manifest.model_copy(update=update))


def _write_retired(store: Store, manifest: Manifest) -> None:
    stats = {name: value for name, value in manifest.stats.items() if name != EXAMPLES}
    content = dump_with_checksum(manifest.model_copy(update={"stats": stats}))
    place = layout.retired(manifest.kind, manifest.fingerprint)
    store.write_bytes(f"{place}/{layout.MANIFEST_NAME}", content)


def drop_retired_examples(store: Store, kind: str, fingerprint: str) -> None:
    """Take the first words of documents out of a retired manifest of an earlier version of this
    program; raises DamagedArtifact."""
    manifest = _find_retired(store, kind, fingerprint)
    if manifest and EXAMPLES in manifest.stats:
        _write_retired(store, manifest)


def find_manifest(store: Store, kind: str, fingerprint: str) -> Manifest | None:
    """The manifest of an artifact, whether it still exists or was removed; None if neither."""
    artifact = store.find_named(kind, fingerprint)
    return artifact.manifest if artifact else _find_retired(store, kind, fingerprint)


def _find_retired(store: Store, kind: str, fingerprint: str) -> Manifest | None:
    place = layout.retired(kind, fingerprint)
    content = store.read_bytes(f"{place}/{layout.MANIFEST_NAME}")
    return None if content is None else parse_manifest(content, f"{store.root}/{place}")


def tell_removal(store: Store, kind: str, fingerprint: str) -> str:
    """What became of an artifact that no longer exists, in words."""
    name, manifest = f"{kind} {fingerprint}", find_manifest(store, kind, fingerprint)
    removed = manifest.provenance.get(REMOVED) if manifest else None
    if removed is None:
        return f"{name} is gone from {store.root}, and its manifest with it"
    return f"{name} was removed on {removed['at'][:10]} by {removed['by']}"


def find_record(store: Store, checkpoint: str, name: str) -> str | None:
    """URL of a record of a checkpoint's text, whether it exists or was removed; None if neither."""
    folders = (layout.artifact("checkpoint", checkpoint), layout.retired("checkpoint", checkpoint))
    places = (f"{folder}/{name}" for folder in folders)
    return next((f"{store.root}/{place}" for place in places if store.has_file(place)), None)


START_INPUT = "start"
"""Name of the starting model among a checkpoint's inputs."""


def find_start(
    record: Pipeline,
    registry: Registry,
    wanted: Identity,
    base: ModelSource,
    from_version: int | None = None,
) -> ModelSource:
    """The wanted version, which is the base model before any candidate was better.

    A checkpoint that was made before from the same text and settings keeps the start it had;
    otherwise a promoted candidate, requested again, would be trained once more on top of itself.
    A base model other than the wanted version's begins a lineage of its own, since the text is
    tokenized for it.

    Args:
        wanted: identity of the checkpoint about to be made, without its start.
        from_version: replaces the wanted version, whatever was made before.

    Raises:
        UserError: training cannot, or may not, continue from that version.
    """
    state = registry.state()
    models = {
        entry.model_fingerprint: ModelSource(
            path=entry.model_url, fingerprint=entry.model_fingerprint
        )
        for entry in state.versions
    } | {base.fingerprint: base}
    if from_version is not None:
        version = state.get(from_version)
        if state.is_rejected(version.weights):
            raise UserError(
                f"Version {from_version} was rejected since, so nothing is trained from it. "
                "`llm-assets versions` lists the others."
            )
        if not has_base(record.store, version, base.fingerprint):
            raise UserError(
                f"Version {from_version} was made from another base model than `base_model` names "
                "now, so it cannot be trained further."
            )
        return models[version.model_fingerprint]
    # By fingerprint, so that a deleted checkpoint is rebuilt from the start it had: each model is
    # tried as that start, until one gives the name that is on record.
    recorded = record.recorded(wanted.kind)
    for model in models.values():
        identity = wanted.extend(inputs={START_INPUT: model.fingerprint})
        if recorded in record.store.names(identity):
            return model
    wanted_version = state.find("wanted")
    if wanted_version is None or not has_base(record.store, wanted_version, base.fingerprint):
        return base
    return models[wanted_version.model_fingerprint]


def has_base(store: Store, version: ModelVersion, base: str) -> bool:
    """Whether a version descends from a base model, under whatever fingerprint that was made.

    True as well if the version's own base model is no longer on record.
    """
    names = (version.lineage.get("base_model"), base)
    own, other = (find_manifest(store, "base_model", name) if name else None for name in names)
    return own is None or other is None or own.settings == other.settings


def find_seen(start: ModelSource) -> str | None:
    """Where the record is of what a model was trained on; a base model has none."""
    record = f"{start.path.rpartition('/')[0]}/{SEEN_NAME}"
    return record if files.exists(record) else None
