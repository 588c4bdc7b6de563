"""The registry in a folder: its files, and what can go wrong with them."""

import shutil
from pathlib import Path

import pytest

from llm_assets.registry.base import STATE_NAME, LocalRegistry
from llm_assets.registry.state import RegistryUnreachable
from tests.llm_assets.registry.conftest import base_entry, entry, judge, verdict


@pytest.fixture
def registry(tmp_path: Path) -> LocalRegistry:
    registry = LocalRegistry(tmp_path / "store", "manual")
    registry.register_base(base_entry())
    return registry


def card(registry: LocalRegistry, version: int) -> str:
    return (Path(registry.folder) / "versions" / str(version) / "card.md").read_text()


def test_card_tells_verdicts_and_decisions_in_order(registry: LocalRegistry) -> None:
    judge(registry, "a", promoted=False)
    registry.approve(1, "Ada", "the floor was too high")
    told = card(registry, 1)
    assert told.index("rejected by the gate: Measured against base.") < told.index(
        "approved by Ada: the floor was too high"
    )
    assert "# Base model, version 0" in card(registry, 0)


@pytest.mark.fault(
    "model_version",
    "a version's folder lost",
    sees="nothing",
    then="no number is assigned twice; it is written again",
)
def test_a_lost_version_folder_gives_no_number_away_and_is_written_again(
    registry: LocalRegistry,
) -> None:
    judge(registry, "a")
    shutil.rmtree(Path(registry.folder) / "versions" / "1")
    assert judge(registry, "b").version == 2
    assert "Version 1" in card(registry, 1)


def test_a_copy_of_a_versions_folder_does_not_keep_the_registry_from_being_restored(
    registry: LocalRegistry,
) -> None:
    judge(registry, "a")
    version = Path(registry.folder) / "versions" / "1"
    shutil.copytree(version, version.with_name("1 (copy)"))
    (Path(registry.folder) / STATE_NAME).unlink()
    assert registry.restore().next_version == 2


@pytest.mark.fault(
    "model_version",
    "registry cannot be reached",
    sees="its folder, and why",
    then="nothing is promoted",
)
def test_registry_whose_folder_is_a_file_is_unreachable(tmp_path: Path) -> None:
    (tmp_path / "registry").write_text("not a folder")
    with pytest.raises(RegistryUnreachable, match="nothing was promoted"):
        LocalRegistry(tmp_path, "manual").register_base(base_entry())


@pytest.mark.fault(
    "store", "store moved", sees="nothing", then="models are served from their new place"
)
def test_a_store_that_moved_serves_its_models_from_where_they_are_now(
    registry: LocalRegistry, tmp_path: Path
) -> None:
    inside = entry("a").model_copy(update={"model_url": f"{registry.root}/checkpoint/a/model"})
    registry.enter(inside, verdict("a", "base"))
    assert registry.get(1).model_url == str(tmp_path / "store/checkpoint/a/model")
    shutil.copytree(tmp_path / "store", tmp_path / "moved")
    moved = LocalRegistry(tmp_path / "moved", "manual")
    wanted = moved.find("wanted")
    assert wanted is not None
    assert wanted.model_url == str(tmp_path / "moved/checkpoint/a/model")
