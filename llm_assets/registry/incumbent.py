"""Which model a candidate has to beat."""

from llm_assets.registry.base import Registry
from recipes.evaluation.settings import ModelSource


def find_incumbent(registry: Registry, candidate: str, base: ModelSource) -> ModelSource:
    """The model that serves when a candidate is first judged; the base model before any other.

    A candidate that is registered already keeps the incumbent it was judged against. Otherwise a
    promoted candidate, asked for again, would be measured against itself.

    Args:
        candidate: fingerprint of the candidate's checkpoint.

    Raises:
        RegistryUnreachable: the registry cannot be asked.
    """
    known = {version.model_fingerprint: version for version in registry.versions()}
    if candidate in known:
        judged_against = known[candidate].evaluation["models"]["incumbent"]
        if judged_against == base.fingerprint:
            return base
        incumbent = known[judged_against]
    else:
        champion = registry.find("champion")
        if champion is None:
            return base
        incumbent = champion
    return ModelSource(path=incumbent.model_url, fingerprint=incumbent.model_fingerprint)
