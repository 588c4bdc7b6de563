"""What a run that goes on from the champion is asked for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from artifacts.shards.format import SPLITS, ShardEntry
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact, Draft, Store
from llm_assets.assets.model import continue_from_champion, training_estimate
from llm_assets.registry.base import LocalRegistry
from llm_assets.registry.state import ModelEntry
from recipes.settings import training_settings
from tests.tiny import shard_stats


def corpus(store: Store, *documents: int) -> Artifact:
    """One with so many documents to train on of each slice."""

    def build(draft: Draft) -> None:
        draft.stats["slices"] = {str(n): {"train": count} for n, count in enumerate(documents, 1)}

    settings = {"documents": documents}
    return store.make(Identity(kind="clean_corpus", code_version="1", settings=settings), build)[0]


def shards(folder: Path, clean_corpus: str = "none") -> Artifact:
    entries = [ShardEntry(name=s, split=s, rows=64, tokens=500, documents=9) for s in SPLITS]
    stats = shard_stats(entries, sequence_length=8, vocab_size=10)

    def build(draft: Draft) -> None:
        draft.stats |= stats.model_dump(mode="json") | {"rows": {"train": 64}}

    identity = Identity(
        kind="tokenized_shards", code_version="1", inputs={"clean_corpus": clean_corpus}
    )
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


def test_new_text_is_read_whole_beside_what_is_replayed_and_seen_again(tmp_path: Path) -> None:
    store, registry = Store(str(tmp_path)), LocalRegistry(tmp_path, "manual")
    before, now = corpus(store, 50), corpus(store, 50, 50)
    registry.register_base(
        ModelEntry(
            weights="weights",
            model_fingerprint="model",
            model_url=str(tmp_path / "model"),
            license="Apache-2.0",
            lineage={"clean_corpus": before.fingerprint},
        )
    )
    settings = training_settings(
        {"budget": {"steps": 4}, "replay_share": 0.5, "order": {"seen_share": 0.5}}
    )
    longer = continue_from_champion(settings, shards(tmp_path, now.fingerprint), registry)
    assert longer.budget.steps == 32, "32 new rows, of 4 in each step one is new"


@pytest.mark.parametrize(
    ("chosen", "rows", "is_most"),
    [
        ({"budget": {"epochs": 1}}, 64, False),
        ({"budget": {"epochs": 1}, "initialize": "champion"}, 84, True),
        ({"budget": {"epochs": 1}, "initialize": "champion", "order": {"seen_share": 0}}, 64, True),
        ({"budget": {"steps": 4}, "initialize": "champion"}, 16, False),
    ],
)
def test_passes_over_rows_that_the_champion_has_not_seen_are_estimated_at_their_most(
    chosen: dict[str, Any], rows: int, is_most: bool, tmp_path: Path
) -> None:
    training: Any = SimpleNamespace(
        check_state=lambda *_: None, estimate=lambda tokens, _: f"{tokens // 8} rows"
    )
    base: Any = SimpleNamespace(stats={"parameters": 1})
    told = training_estimate(training, training_settings(chosen), shards(tmp_path), base)
    most = ", at most, as rows that the champion has seen are left out" if is_most else ""
    assert told == f"{rows} rows{most}"
