"""What every registry promises, in a folder and in Vertex AI."""

from collections.abc import Callable

import pytest

from artifacts.errors import UserError
from llm_assets.gate.settings import GateSettings
from llm_assets.gate.verdict import Decision
from llm_assets.registry.base import Registry, UnknownVersion
from llm_assets.registry.decisions import approve, reject, roll_back
from tests.llm_assets.registry.conftest import entry


def champion(registry: Registry) -> int:
    found = registry.find("champion")
    assert found is not None
    return found.version


def test_base_model_is_version_0_and_the_first_champion(registry: Registry) -> None:
    assert registry.find("champion") is None and registry.versions() == []
    registry.register_base(entry("base", promoted=None))
    assert champion(registry) == 0
    registry.register_base(entry("base", promoted=None))
    assert len(registry.versions()) == 1
    registry.register_base(entry("newer-base", promoted=None))
    (base,) = registry.versions()
    assert base.model_fingerprint == "newer-base" and champion(registry) == 0


def test_versions_are_numbered_and_a_known_one_is_found_again(
    open_registry: Callable[[], Registry],
) -> None:
    registry = open_registry()
    first, second = registry.register(entry("a")), registry.register(entry("b"))
    assert (first.version, second.version) == (1, 2)
    assert open_registry().register(entry("a")).version == 1
    assert [version.version for version in open_registry().versions()] == [1, 2]
    assert registry.get(2).lineage["raw_corpus"] == "text"
    with pytest.raises(UnknownVersion, match="no version 7"):
        registry.get(7)


def test_promotion_moves_champion_and_previous_and_keeps_the_history(
    open_registry: Callable[[], Registry],
) -> None:
    registry = open_registry()
    registry.register_base(entry("base", promoted=None))
    for name in "ab":
        registry.promote(registry.register(entry(name)).version, "better")
    previous = registry.find("previous")
    assert champion(registry) == 2 and previous is not None and previous.version == 1
    moves = [(move.alias, move.version) for move in open_registry().history()]
    assert moves == [
        ("champion", 0),
        ("previous", 0),
        ("champion", 1),
        ("previous", 1),
        ("champion", 2),
    ]
    registry.promote(2, "again")
    assert len(registry.history()) == 5


def test_other_thresholds_give_a_new_verdict_and_keep_decisions(registry: Registry) -> None:
    registry.register(entry("a", promoted=False))
    registry.decide(1, Decision(approved=True, name="Ada", reason="the floor was too high"))
    stricter = entry("a", promoted=True)
    assert stricter.verdict is not None
    thresholds = GateSettings(general_tolerance=0.5)
    verdict = stricter.verdict.model_copy(update={"thresholds": thresholds})
    again = registry.register(stricter.model_copy(update={"verdict": verdict}))
    assert again.version == 1 and again.verdict is not None
    assert again.verdict.thresholds == thresholds
    assert [said.name for said in again.verdict.decisions] == ["Ada"]
    assert registry.get(1) == again


def test_people_approve_reject_and_go_back(registry: Registry) -> None:
    registry.register_base(entry("base", promoted=None))
    with pytest.raises(UserError, match="no version to go back to"):
        roll_back(registry, "errors")
    for name in "ab":
        registry.register(entry(name, promoted=False))
    approve(registry, 1, "Ada", "reads well")
    approve(registry, 2, "Ada", "reads better")
    verdict = registry.get(2).verdict
    assert verdict is not None and verdict.accepted
    reject(registry, 2, "Bo", "it swears")
    assert champion(registry) == 1
    assert "rejected by Bo" in registry.history()[-1].reason
    assert roll_back(registry, "errors").version == 2
    with pytest.raises(UserError, match="name and a reason"):
        approve(registry, 1, "", "why")
    with pytest.raises(UnknownVersion, match="base model"):
        registry.decide(0, Decision(approved=False, name="Ada", reason="old"))
