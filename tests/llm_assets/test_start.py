"""Training that continues from the model that serves."""

from pathlib import Path

import pytest

from artifacts.errors import UserError
from artifacts.store.identity import Identity
from artifacts.store.store import Artifact
from llm_assets.registry.start import START_INPUT, find_start
from recipes.evaluation.settings import ModelSource
from tests.conftest import Project
from tests.llm_assets.maintenance.weeks import Weeks


@pytest.mark.soak
def test_new_text_continues_from_the_champion_and_nothing_trains_on_itself(
    project: Project,
) -> None:
    project.configure(checkpoint={"initialize": "champion", "budget": {"steps": 8}})
    project.run_well("llm-assets", "run")
    base = project.current("base_model").fingerprint
    first = project.current("checkpoint")
    assert first.manifest.inputs["start"] == base

    again = project.run("llm-assets", "run")
    assert "checkpoint unchanged" in " ".join(again.stdout.split())
    assert project.current("checkpoint").fingerprint == first.fingerprint

    for number in range(30):
        text = f"Annex {number}. " + "The inner ring is replaced at 40 °C by the operator. " * 3
        (project.folder / "text" / f"annex-{number}.txt").write_text(text + f"Part {number}.")
    project.run_well("llm-assets", "run")
    second = project.current("checkpoint")
    assert second.manifest.inputs["start"] == first.fingerprint
    start = second.stats["validation"]["start"]
    assert start < first.stats["validation"]["start"] / 1.3


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
