"""Which weights a training that continues from the champion starts with."""

from artifacts.storage import files
from artifacts.store.identity import Identity
from artifacts.store.pipelines import Pipeline
from artifacts.store.store import Store
from llm_assets.registry.base import Registry
from llm_assets.registry.records import ModelVersion
from llm_assets.registry.retired import find_manifest
from recipes.data.seen import SEEN_NAME
from recipes.evaluation.settings import ModelSource

START_INPUT = "start"
"""Name of the starting model among a checkpoint's inputs."""


def find_start(
    record: Pipeline, registry: Registry, wanted: Identity, base: ModelSource
) -> ModelSource:
    """The wanted version, which is the base model before any candidate was better.

    A checkpoint that was made already for the same text and settings keeps the start it had.
    Otherwise a promoted candidate, asked for again, would be trained once more on top of itself.
    Another base model than the wanted version's begins a lineage of its own: the text is tokenized
    for it.

    Args:
        wanted: identity of the checkpoint about to be made, without its start.

    Raises:
        RegistryUnreachable: the registry cannot be asked.
    """
    models = {
        version.model_fingerprint: ModelSource(
            path=version.model_url, fingerprint=version.model_fingerprint
        )
        for version in registry.versions()
    } | {base.fingerprint: base}
    # By fingerprint, so that a checkpoint that was deleted is made again from the start it had.
    recorded = record.recorded(wanted.kind)
    for model in models.values():
        if with_start(wanted, model).fingerprint == recorded:
            return model
    decided = registry.find("wanted")
    if decided is None or not _has_base(record.store, decided, base):
        return base
    return models[decided.model_fingerprint]


def _has_base(store: Store, version: ModelVersion, base: ModelSource) -> bool:
    """Whether a version goes back to a base model, under whatever fingerprint it was made.

    So it counts, too, where its own base model is no longer on record.
    """
    names = (version.lineage.get("base_model"), base.fingerprint)
    own, other = (find_manifest(store, "base_model", name) if name else None for name in names)
    return own is None or other is None or own.settings == other.settings


def with_start(identity: Identity, start: ModelSource) -> Identity:
    """The identity with the starting model among its inputs."""
    inputs = identity.inputs | {START_INPUT: start.fingerprint}
    return identity.model_copy(update={"inputs": inputs})


def find_seen(start: ModelSource) -> str | None:
    """Where the record is of what a model was trained on; a base model has none."""
    record = f"{start.path.rpartition('/')[0]}/{SEEN_NAME}"
    return record if files.exists(record) else None
