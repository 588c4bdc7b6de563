"""The registry in a folder: its files, and what can go wrong with them."""

import os
from pathlib import Path

import pytest

from llm_assets.gate.verdict import Decision
from llm_assets.registry.base import RegistryUnreachable
from llm_assets.registry.local import LocalRegistry
from tests.llm_assets.registry.conftest import entry


@pytest.fixture
def registry(tmp_path: Path) -> LocalRegistry:
    return LocalRegistry(tmp_path, "manual")


def test_decision_of_a_person_is_recorded_and_on_the_card(registry: LocalRegistry) -> None:
    registry.register(entry("a", promoted=False))
    registry.decide(1, Decision(approved=True, name="Ada", reason="the floor was too high"))
    found = registry.get(1)
    assert found.verdict is not None and found.verdict.accepted
    card = (registry.folder / "versions" / "1" / "card.md").read_text()
    assert "Approved by Ada" in card and "the floor was too high" in card


def test_damaged_registry_is_unreachable_not_empty(registry: LocalRegistry) -> None:
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
