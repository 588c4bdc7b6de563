"""torchtune's recipes of DPO on the graph's examples: what they compute, and what they refuse."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from artifacts.shards.shard_set import MaskedShardSet, ShardSet
from recipes.data.batch import IGNORED
from recipes.settings import training_settings
from recipes.spec import TrainingSpec
from recipes.torchtune.objective import PreferenceScorer, read_preferences
from tests.recipes.causal.test_answers import held_out
from tests.recipes.conftest import course, losses, spec_in, train_here, train_together
from tests.recipes.test_recipes import Prepared
from tests.tiny_tasks import SMALL, TASKS

STEPS = 8
BETA = 0.5
CONFIGS = {
    "lora_dpo_single_device": "llama2/7B_lora_dpo_single_device",
    "lora_dpo_distributed": "llama2/7B_lora_dpo",
    "full_dpo_distributed": "llama3_1/8B_full_dpo",
}
TASK = TASKS["preferences"]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared("preferences", tmp_path_factory.mktemp("preferences"))


Make = Callable[..., TrainingSpec]


@pytest.fixture
def make(tmp_path: Path, prepared: Prepared) -> Make:
    def spec(program: str, overrides: dict[str, Any] | None = None, **more: Any) -> TrainingSpec:
        settings = {
            "recipe": "torchtune",
            "run": program,
            "config": CONFIGS[program],
            "overrides": SMALL | {"loss.beta": BETA} | (overrides or {}),
            "budget": {"steps": STEPS},
        }
        folder = tmp_path / f"{program}-{more.get('placement', {}).get('workers', 1)}"
        training = training_settings(settings | more)
        return spec_in(folder, prepared.base, prepared.shards_folder, prepared.shards, training)

    return spec


@pytest.mark.parametrize(
    "program",
    [
        "lora_dpo_single_device",
        pytest.param("lora_dpo_distributed", marks=pytest.mark.soak),
        pytest.param("full_dpo_distributed", marks=pytest.mark.soak),
    ],
)
def test_its_loss_is_dpos_of_the_answers_margins(
    program: str, make: Make, prepared: Prepared
) -> None:
    """Rafailov and others (2023), by what transformers says of the base and the new model."""
    spec = make(program, validation={"rows": 1000})
    validation = train_here(spec).validation
    assert course(spec)[0][0] == pytest.approx(math.log(2), rel=1e-5)
    assert validation["start"] == pytest.approx(1)
    assert validation["end"] < 0.8
    assert all(norm > 0 for _, norm, _ in course(spec))

    entries = [e.model_copy(update={"split": "held_out"}) for e in prepared.shards.shards]
    of_validation = {"shards": [e for e in entries if "validation" in e.name]}
    stats = prepared.shards.model_copy(update=of_validation)
    tokenizer = AutoTokenizer.from_pretrained(prepared.base)
    examples = held_out(prepared.shards_folder, stats, tokenizer)
    before, after = (
        PreferenceScorer().score(folder, examples, stats).values["preference_margin"]
        for folder in (prepared.base, Path(spec.export_folder))
    )
    expected = np.log1p(np.exp(-BETA * (after - before)))
    # The scorer computes in the precision that the endpoint has.
    assert expected.mean() / math.log(2) == pytest.approx(validation["end"], abs=0.02)


@pytest.mark.soak
@pytest.mark.parametrize("program", ["lora_dpo_distributed", "full_dpo_distributed"])
def test_two_workers_take_the_steps_of_one(program: str, make: Make) -> None:
    one = make(program)
    two = make(program, {"batch_size": 2}, placement={"workers": 2})
    for spec, workers in ((one, 1), (two, 2)):
        train_together(spec, workers)
    assert one.content() == two.content()
    assert losses(two) == pytest.approx(losses(one), abs=2e-3)


def test_a_batch_has_both_conversations_and_marks_their_answers(prepared: Prepared) -> None:
    tokenizer = AutoTokenizer.from_pretrained(prepared.base)
    shards = ShardSet(prepared.shards_folder, prepared.shards, "validation")
    batch = read_preferences(shards, np.arange(3))
    assert batch.target_count == 3
    # As a causal model attends: with itself and those before.
    assert batch.pair_count == int((batch.is_input.cumsum(dim=1) * batch.is_input).sum())
    for number, example in enumerate(TASK.examples()[8:29:10]):
        for row, key in ((number, "chosen"), (number + 3, "rejected")):
            text = tokenizer.decode(batch.tokens[row][batch.is_input[row]])
            prompt = f"user:\n{example['question']}<|endoftext|>\nassistant:\n"
            assert text == f"{prompt}{example[key]}<|endoftext|>\n"
            answer = batch.targets[row][batch.targets[row] != IGNORED]
            assert tokenizer.decode(answer) == f"{example[key]}<|endoftext|>\n"


def test_a_forgotten_example_teaches_nothing(prepared: Prepared) -> None:
    # In these shards, the hash of a text is its number.
    shards = MaskedShardSet(prepared.shards_folder, prepared.shards, ["18"], "validation")
    batch = read_preferences(shards, np.arange(3))
    assert batch.is_example.tolist() == [True, False, True]
    assert (batch.targets[[1, 4]] == IGNORED).all() and not batch.is_input[[1, 4]].any()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": "conversations"}, "`data` cannot be combined with lora_dpo_single_device"),
        ({"overrides": {"model.use_dora": True}}, "`model.use_dora` cannot be honored: of DPO"),
        ({"overrides": {"clip_grad_norm": 1.0}}, "`clip_grad_norm` is not a key that lora_dpo_sin"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    program = "lora_dpo_single_device"
    with pytest.raises(ValidationError, match=message):
        training_settings(
            {"recipe": "torchtune", "run": program, "config": CONFIGS[program]} | given
        )
