"""Training that continues from the model that serves."""

from pathlib import Path

import pytest

from artifacts.errors import UserError
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact
from llm_assets.registry.start import START_INPUT, find_start
from recipes.evaluation.settings import ModelSource
from tests.llm_assets.maintenance.weeks import Weeks


def test_the_same_training_trains_on_where_it_names_the_version_to_continue_from(
    tmp_path: Path,
) -> None:
    weeks = Weeks(tmp_path / "store")
    version = weeks.retrain(1, promoted=True)
    made = weeks.current("checkpoint")
    identity = made.manifest.identity
    inputs = {name: one for name, one in identity.inputs.items() if name != START_INPUT}
    same = identity.model_copy(update={"inputs": inputs})
    base = ModelSource(path=weeks.base.url, fingerprint=weeks.base.fingerprint)
    assert find_start(weeks.record, weeks.registry, same, base) == base, "it is found again"
    again = find_start(weeks.record, weeks.registry, same, base, version)
    assert again.fingerprint == made.fingerprint

    other_base = weeks.base.manifest.identity.model_copy(update={"settings": {"hub": "team/other"}})
    prepared, _ = weeks.store.make(other_base, lambda _: None)
    other = ModelSource(path=prepared.url, fingerprint=prepared.fingerprint)
    with pytest.raises(UserError, match="made from another base model"):
        find_start(weeks.record, weeks.registry, same, other, version)
    weeks.registry.reject(version, "Ada", "it rambles")
    with pytest.raises(UserError, match=f"Version {version} was rejected since"):
        find_start(weeks.record, weeks.registry, same, base, version)


def start_of(weeks: Weeks, base: Artifact) -> str:
    """What a checkpoint on new text starts from, with this base model in the settings."""
    inputs = {"tokenized_shards": "new", "base_model": base.fingerprint}
    wanted = Identity(kind="checkpoint", code_version="1", inputs=inputs)
    source = ModelSource(path=base.url, fingerprint=base.fingerprint)
    return find_start(weeks.record, weeks.registry, wanted, source).fingerprint


def test_another_base_model_begins_a_lineage_of_its_own(tmp_path: Path) -> None:
    """Its text is tokenized for it, and no champion of another tokenizer could read that."""
    weeks = Weeks(tmp_path / "store")
    weeks.retrain(1, promoted=True)
    champion = weeks.current("checkpoint").fingerprint
    same, other = (
        weeks.store.make(weeks.base.manifest.identity.model_copy(update=changes), lambda _: None)[0]
        for changes in ({"code_version": "2"}, {"settings": {"hub": "team/other"}})
    )
    assert start_of(weeks, weeks.base) == start_of(weeks, same) == champion
    assert start_of(weeks, other) == other.fingerprint
