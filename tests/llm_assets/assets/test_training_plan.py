"""What a run that goes on from the champion is asked for."""

from pathlib import Path

import pytest

from artifacts.shards.format import SPLITS, ShardEntry
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.assets.training_plan import continue_from_champion
from llm_assets.registry.base import LocalRegistry
from recipes.settings import training_settings
from tests.tiny import shard_stats


def shards(folder: Path) -> Artifact:
    entries = [ShardEntry(name=s, split=s, rows=64, tokens=500, documents=9) for s in SPLITS]
    stats = shard_stats(entries, sequence_length=8, vocab_size=10)

    def build(draft: Draft) -> None:
        draft.stats |= stats.model_dump(mode="json") | {"rows": {"train": 64}}

    identity = Identity(kind="tokenized_shards", code_version="1", inputs={"clean_corpus": "none"})
    return Store(str(folder)).make(identity, build)[0]


@pytest.mark.parametrize(
    ("recipe", "start"),
    [
        ("continued_pretraining", "champion"),
        ("classification", "champion"),
        ("sequence_to_sequence", "champion"),
        ("pretraining", "random"),
    ],
)
def test_every_recipe_that_can_goes_on_from_the_champion(
    recipe: str, start: str, tmp_path: Path
) -> None:
    settings = training_settings({"recipe": recipe, "budget": {"steps": 7}})
    registry = LocalRegistry(tmp_path, "manual")
    longer = continue_from_champion(settings, shards(tmp_path), registry, longer=3)
    assert longer.starts_from == start
    assert longer.budget.steps == 21
