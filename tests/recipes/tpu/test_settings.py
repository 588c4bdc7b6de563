"""Which device trains, and batches of few shapes for a TPU; none of it needs torch_xla."""

from pathlib import Path

import pytest
import torch

from artifacts.errors import UserError
from llm_assets.runners.training import LocalTrainingRunner
from recipes.data.batch import IGNORED, ExampleBatch
from recipes.distributed.workers import join_workers
from recipes.settings import PlacementSettings
from recipes.spec import command
from recipes.tpu.device import in_few_shapes, join
from recipes.tpu.settings import TPU_ENVIRONMENT
from tests.recipes.conftest import settings_of


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


def batch(rows: int, inputs: int, targets: int) -> ExampleBatch:
    tokens = torch.arange(rows * inputs).view(rows, inputs)
    told = torch.ones(rows, targets, dtype=torch.long)
    return ExampleBatch(tokens, torch.ones(rows, inputs, dtype=torch.bool), told)


def test_examples_are_padded_to_powers_of_two_and_no_row_shows_nothing() -> None:
    given = batch(rows=5, inputs=9, targets=3)
    made = in_few_shapes(given, rows=4, longest=64)
    assert made.tokens.shape == (8, 16) and made.targets.shape == (8, 4)
    assert made.target_count == given.target_count
    assert torch.equal(made.tokens[:5, :9], given.tokens)
    assert made.is_input.any(dim=1).all() and not made.is_input[:5, 9:].any()
    assert (made.targets[5:] == IGNORED).all()


def test_no_row_is_longer_than_those_of_the_shards() -> None:
    made = in_few_shapes(batch(rows=4, inputs=33, targets=1), rows=4, longest=40)
    assert made.tokens.shape == (4, 40) and made.targets.shape == (4, 1)
