"""The registry in a folder."""

import os
from pathlib import Path

import pytest

from llm_assets.gate.settings import GateSettings
from llm_assets.gate.verdict import Decision, Outcome, Reason, Verdict
from llm_assets.registry.base import ModelEntry, RegistryUnreachable, UnknownVersion
from llm_assets.registry.local import LocalRegistry


def entry(model: str, promoted: bool | None = True) -> ModelEntry:
    verdict = None
    if promoted is not None:
        verdict = Verdict(
            promoted=promoted,
            reasons=[Reason(outcome=Outcome.BETTER, text="It is better.")],
            comparisons=[],
            thresholds=GateSettings(),
            evaluation_fingerprint="evaluation",
            judged_before=0,
        )
    return ModelEntry(
        model_fingerprint=model,
        model_url=f"/models/{model}",
        license="Apache-2.0",
        lineage={"checkpoint": model, "raw_corpus": "text"},
        evaluation={"evaluation_fingerprint": "evaluation", "models": {"candidate": model}},
        verdict=verdict,
    )


@pytest.fixture
def registry(tmp_path: Path) -> LocalRegistry:
    return LocalRegistry(tmp_path, "manual")


def test_base_model_is_version_0_and_the_first_champion(registry: LocalRegistry) -> None:
    assert registry.find("champion") is None
    registry.register_base(entry("base", promoted=None))
    champion = registry.find("champion")
    assert champion is not None and champion.version == 0
    registry.register_base(entry("base", promoted=None))
    assert len(registry.versions()) == 1


def test_versions_are_numbered_and_a_known_one_is_found_again(registry: LocalRegistry) -> None:
    first, second = registry.register(entry("a")), registry.register(entry("b"))
    assert (first.version, second.version) == (1, 2)
    assert registry.register(entry("a")).version == 1
    assert [version.version for version in registry.versions()] == [1, 2]
    assert registry.get(2).lineage["raw_corpus"] == "text"


def test_promotion_moves_champion_and_previous_and_keeps_the_history(
    registry: LocalRegistry,
) -> None:
    registry.register_base(entry("base", promoted=None))
    for name in "ab":
        registry.promote(registry.register(entry(name)).version, "better")
    champion, previous = registry.find("champion"), registry.find("previous")
    assert champion is not None and previous is not None
    assert (champion.version, previous.version) == (2, 1)
    moves = [(move.alias, move.version) for move in registry.history()]
    assert moves == [
        ("champion", 0),
        ("previous", 0),
        ("champion", 1),
        ("previous", 1),
        ("champion", 2),
    ]
    registry.promote(2, "again")
    assert len(registry.history()) == 5


def test_decision_of_a_person_is_recorded_and_on_the_card(registry: LocalRegistry) -> None:
    registry.register(entry("a", promoted=False))
    registry.decide(1, Decision(approved=True, name="Ada", reason="the floor was too high"))
    found = registry.get(1)
    assert found.verdict is not None and found.verdict.accepted
    card = (registry.folder / "versions" / "1" / "card.md").read_text()
    assert "Approved by Ada" in card and "the floor was too high" in card


def test_unknown_version_and_unreachable_registry_are_told_apart(registry: LocalRegistry) -> None:
    with pytest.raises(UnknownVersion, match="no version 7"):
        registry.get(7)
    registry.register(entry("a"))
    (registry.folder / "aliases.json").write_text('{"half":')
    with pytest.raises(RegistryUnreachable, match="nothing was promoted"):
        registry.find("champion")


def test_registry_whose_folder_is_a_file_is_unreachable(tmp_path: Path) -> None:
    (tmp_path / "registry").write_text("not a folder")
    with pytest.raises(RegistryUnreachable):
        LocalRegistry(tmp_path, "manual").register(entry("a"))


def test_leftover_of_a_killed_writer_is_no_version(registry: LocalRegistry) -> None:
    folder = registry.folder / "versions" / "1"
    folder.mkdir(parents=True)
    (folder / "card.md").write_text("half")
    assert registry.versions() == []
    assert registry.register(entry("a")).version == 1
    assert os.path.exists(folder / "version.json")
