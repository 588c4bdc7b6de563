"""Which device trains, and what does not go with a TPU; torch_xla is not needed for these."""

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from artifacts.errors import UserError
from llm_assets.runners.training import LocalTrainingRunner
from recipes.distributed.workers import join_workers
from recipes.settings import PlacementSettings
from recipes.spec import command
from recipes.tpu.device import join
from recipes.tpu.settings import TPU_ENVIRONMENT
from tests.recipes.conftest import settings_of


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("optimizer.name: muon", {"optimizer": {"name": "muon"}}),
        ("placement.workers", {"workers": 2}),
        ("placement.replicas", {"replicas": 2}),
        ("placement.tensor_parallel", {"tensor_parallel": 2}),
        ("placement.activation_checkpointing", {"activation_checkpointing": True}),
        ("placement.compile: always", {"compile": "always"}),
        ("checkpointing.in_background: always", {"in_background": "always"}),
    ],
)
def test_what_does_not_go_with_a_tpu_is_refused_by_name(key: str, settings: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError, match=f"device: tpu cannot be combined with {re.escape(key)}"
    ):
        settings_of(device="tpu", **settings)


def test_one_strategy_at_a_time() -> None:
    with pytest.raises(ValidationError, match=r"give one strategy \(found deepspeed and device\)"):
        settings_of(device="tpu", deepspeed={"stage": 3})


def test_hardware_that_no_package_brings_is_refused_with_what_there_is() -> None:
    with pytest.raises(
        ValidationError, match=r"nothing of this name is installed. Installed: deepspeed, tpu\."
    ):
        settings_of(device="quantum")


def test_torchtunes_recipes_are_refused_on_a_tpu() -> None:
    torchtune = {"recipe": "torchtune", "run": "full_finetune_distributed"}
    with pytest.raises(ValidationError, match="device: tpu` cannot be combined with torchtune"):
        settings_of(device="tpu", config="llama3_2/1B_full", **torchtune)


def test_the_device_does_not_change_what_the_checkpoint_is() -> None:
    on_tpu, anywhere = settings_of(device="tpu"), settings_of()
    assert PlacementSettings.model_validate({"device": "tpu", "tpu": {}}) == on_tpu.placement
    assert on_tpu.content() == anywhere.content()


def test_training_on_a_tpu_is_started_in_its_own_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(TPU_ENVIRONMENT, str(tmp_path))
    with pytest.raises(UserError, match=r"there is no .*bin/python\. Create .* `make setup-tpu`"):
        LocalTrainingRunner().resolve(settings_of(device="tpu"))
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    assert command(Path("s.json"), 1, settings_of(device="tpu").placement.python())[0] == str(
        python
    )
    # Every TPU multiplies bfloat16, whatever this machine does.
    assert LocalTrainingRunner().resolve(settings_of(device="tpu")).precision == "bfloat16"


def test_an_environment_without_torch_xla_is_told() -> None:
    with pytest.raises(UserError, match=r"has no torch_xla .* make setup-tpu"):
        join(1)


def test_several_processes_on_a_tpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="one process drives all chips of one machine, but 2 were"):
        join_workers(settings_of(device="tpu").placement.strategy)
