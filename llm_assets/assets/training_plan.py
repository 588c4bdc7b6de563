"""How long a training will be: enough to read what arrived since; its hours and its cost."""

import math

from artifacts.shards.format import ShardStats
from artifacts.store.store import Artifact
from llm_assets.registry.base import Registry
from llm_assets.registry.start import find_manifest
from llm_assets.runners.training import TrainingRunner
from recipes.settings import (
    BUDGETS,
    RecipeSettings,
    TrainingSettings,
    WarmStartSettings,
    training_settings,
)
from recipes.spec import total_steps

MOST_TIMES = 8
"""Times the pipeline file's budget that reading new text may take; more text takes several runs."""


def continue_from_champion(
    settings: RecipeSettings, shards: Artifact, registry: Registry, longer: int = 1
) -> RecipeSettings:
    """The settings with the wanted model as the start and a budget in steps.

    The budget is the given one, or one pass over the documents that arrived since the wanted model
    was trained, together with what is seen again or replayed beside them, whichever is longer. A
    recipe that starts from random weights keeps its start.
    """
    stats = ShardStats.model_validate(shards.stats)
    usual = total_steps(settings, stats)
    rows = new_share(shards, registry) * shards.stats["rows"]["train"]
    own = (1 - settings.replay_share) * (1 - settings.order.seen_share)
    needed = math.ceil(rows / (own * settings.budget.global_batch_size))
    values = settings.model_dump()
    steps = longer * max(usual, min(needed, MOST_TIMES * usual))
    values["budget"] |= dict.fromkeys(BUDGETS) | {"steps": steps}
    if isinstance(settings, WarmStartSettings):
        values["initialize"] = "champion"
    return training_settings(values)


def new_share(shards: Artifact, registry: Registry) -> float:
    """Share of the training documents that arrived since the wanted model was trained.

    0 where that is the base model, or its corpus is no longer on record.
    """
    store = shards.store
    wanted = registry.find("wanted")
    fingerprint = wanted.lineage.get("clean_corpus") if wanted else None
    before = find_manifest(store, "clean_corpus", fingerprint) if fingerprint else None
    now = find_manifest(store, "clean_corpus", shards.manifest.inputs["clean_corpus"])
    if before is None or now is None:
        return 0.0
    last = max(map(int, before.stats["slices"]), default=0)
    counts = {int(at): found.get("train", 0) for at, found in now.stats["slices"].items()}
    new = sum(count for at, count in counts.items() if at > last)
    return new / max(1, sum(counts.values()))


def training_estimate(
    training: TrainingRunner, settings: TrainingSettings, shards: Artifact, base: Artifact
) -> str | None:
    """Such as `checkpoint: about 2.3 h, 9.70 USD`; None where the runner costs nothing.

    Which rows the champion has seen is known only when training begins, so passes over the others
    are estimated at their most.

    Raises:
        UserError: the runner's machines are too small for the model.
    """
    training.check_state(settings, base.stats["parameters"])
    stats = ShardStats.model_validate(shards.stats)
    steps, is_most = total_steps(settings, stats), False
    if settings.starts_from == "champion" and settings.budget.epochs is not None:
        all_but_one = shards.stats["rows"]["train"] - 1
        steps, is_most = max(steps, total_steps(settings, stats, all_but_one)), True
    tokens = steps * settings.budget.global_batch_size * stats.sequence_length
    expected = training.estimate(tokens, base.stats["parameters"])
    if expected and is_most:
        expected += ", at most, as rows that the champion has seen are left out"
    return expected
