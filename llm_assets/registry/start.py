"""Which weights a training that continues from the champion starts with."""

from artifacts.identity import Identity
from artifacts.pipelines import Pipeline
from llm_assets.registry.base import Registry
from recipes.evaluation.settings import ModelSource

START_INPUT = "start"
"""Name of the starting model among a checkpoint's inputs."""


def find_start(
    record: Pipeline, registry: Registry, wanted: Identity, base: ModelSource
) -> ModelSource:
    """The champion, or the base model before there is one.

    A checkpoint that exists already for the same text and settings keeps the start it had.
    Otherwise a promoted candidate, asked for again, would be trained once more on top of itself.

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
    current = record.find_current(wanted.kind)
    if current:
        started_from = current.manifest.inputs.get(START_INPUT, "")
        known = models.get(started_from)
        if known and current.manifest.identity == with_start(wanted, known):
            return known
    champion = registry.find("champion")
    return models[champion.model_fingerprint] if champion else base


def with_start(identity: Identity, start: ModelSource) -> Identity:
    """The identity with the starting model among its inputs."""
    inputs = identity.inputs | {START_INPUT: start.fingerprint}
    return identity.model_copy(update={"inputs": inputs})
