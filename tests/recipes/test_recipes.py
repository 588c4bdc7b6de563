"""The contract that every recipe has: learn, go on after any end, be measured, fail loudly."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from _pytest.mark.structures import ParameterSet

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from llm_assets.gate.judge import judge
from llm_assets.gate.verdict import GateSettings
from recipes.evaluate import run as evaluate
from recipes.evaluation.settings import EvaluationSettings, ModelSource
from recipes.evaluation.spec import EvaluationSpec
from recipes.spec import TrainingSpec, read_result
from tests.example_shards import example_shards
from tests.recipes.conftest import (
    course,
    exported,
    kill_at,
    launcher,
    losses,
    on_model,
    run,
    run_well,
    same,
    settings_of,
    spec_in,
    stop_here,
    train_here,
)
from tests.tiny import change_weights
from tests.tiny_tasks import LONG, TASKS

ONE_OF_EACH_FAMILY = ("fine_tuning", "sequence_to_sequence", "classification")
ANSWERS_NOTHING = ("llama_gsm8k",)
"""Judged by exact answers, which an adapter of attention does not learn beside the frozen matrices
of a random model: 0 before and after, whatever the loss."""


class Prepared:
    """A task's base model and shards."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.base, self.shards_folder = folder / "base", folder / "shards"
        self.checkpoint = TASKS[name].prepare(folder)
        self.shards: ShardStats = example_shards(self.shards_folder, self.base, TASKS[name])

    def spec(self, run_name: str, **training: Any) -> TrainingSpec:
        task = {k: v for k, v in self.checkpoint.items() if k != "budget"}
        defaults: dict[str, Any] = {"steps": TASKS[self.name].steps, "precision": "float32"}
        if task["recipe"] == "torchtune":
            # Precision and learning rate are those of its own configuration.
            del defaults["precision"]
        else:
            defaults["learning_rate"] = 1e-2
        settings = settings_of(**defaults | task | training)
        return spec_in(self.folder, self.base, self.shards_folder, self.shards, settings, run_name)

    def train(self, spec: TrainingSpec) -> None:
        """Train by as many processes as the task has."""
        if self.program:
            run_well(spec, self.program)
        else:
            train_here(spec)

    @property
    def program(self) -> list[str] | None:
        """The launcher's command line, where there is one."""
        workers = TASKS[self.name].workers
        return launcher(workers) if workers > 1 else None


def parameters(*names: str) -> list[ParameterSet]:
    return [pytest.param(name, marks=[pytest.mark.soak] * (name in LONG)) for name in names]


ONE_PROCESS = parameters(*(name for name, task in TASKS.items() if task.workers == 1))
"""Those that one process trains; of the others deepspeed/test_strategy.py has the same."""


@pytest.fixture(scope="module", params=parameters(*TASKS))
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def whole(prepared: Prepared) -> TrainingSpec:
    """A run that nothing disturbed."""
    spec = prepared.spec("whole", validation={"every_steps": 4})
    prepared.train(spec)
    return spec


def test_it_learns(prepared: Prepared, whole: TrainingSpec) -> None:
    result = read_result(Path(whole.run_folder))
    assert result is not None
    assert result.validation["end"] < TASKS[prepared.name].learns * result.validation["start"]


@pytest.mark.parametrize("prepared", ["fine_tuning"], indirect=True)
def test_what_a_target_is_is_said_once(prepared: Prepared) -> None:
    lines: list[str] = []
    train_here(prepared.spec("told", steps=2, validation={"every_steps": 1}), lines.append)
    told = [line for line in lines if "bits per target" in line]
    assert ["a target is a token of an answer" in line for line in told] == [True, False, False]


@pytest.mark.parametrize("prepared", ONE_PROCESS, indirect=True)
def test_an_interrupted_run_goes_on_exactly(prepared: Prepared, whole: TrainingSpec) -> None:
    spec = prepared.spec("stopped", validation={"every_steps": 4})
    torch.set_num_threads(1)
    stop_here(spec, 4)
    train_here(spec)

    assert course(spec) == course(whole)
    assert same(exported(spec), exported(whole))


@pytest.mark.soak
def test_a_killed_run_goes_on_exactly(prepared: Prepared) -> None:
    whole, killed = (
        prepared.spec(name, steps=30, checkpointing={"every_steps": 6}) for name in ("long", "kill")
    )
    prepared.train(whole)
    kill_at(killed, 9, prepared.program)
    assert "Going on from the checkpoint of step" in run_well(killed, prepared.program)
    assert course(killed) == course(whole)
    assert same(exported(killed), exported(whole))


@pytest.mark.soak
def test_two_workers_train_the_same_rows(prepared: Prepared, whole: TrainingSpec) -> None:
    if prepared.checkpoint["recipe"] == "torchtune" or prepared.program:
        pytest.skip("of one device, or of two already; see torchtune/test_recipes.py")
    spec = prepared.spec("shared", validation={"every_steps": 4})
    run_well(spec, launcher(2))
    rel = 1e-4 if spec.training.precision == "float32" else 1e-2
    assert losses(spec) == pytest.approx(losses(whole), rel=rel)


def test_damage_ends_the_training_with_a_reason(prepared: Prepared, tmp_path: Path) -> None:
    spec, reason = damaged(prepared, tmp_path)
    if prepared.program:
        code, output = run(spec, prepared.program)
        assert code == 1 and reason in output, output
    else:
        with pytest.raises(UserError, match=reason):
            train_here(spec)
    assert not Path(spec.export_folder).exists()


def damaged(prepared: Prepared, folder: Path) -> tuple[TrainingSpec, str]:
    """A run on weights that are no numbers, or where none are read on tokens that are none."""
    spec = prepared.spec("damaged")
    if spec.training.starts_from == "random":
        shards = shutil.copytree(prepared.shards_folder, folder / "shards")
        tokens = shards / f"{prepared.shards.shards[0].name}.tokens"
        tokens.write_bytes(b"\xff" * tokens.stat().st_size)
        return spec.model_copy(update={"shards_folder": str(shards)}), "outside the vocabulary"

    def spoil(weights: dict[str, Any]) -> None:
        weights |= {name: weight * float("nan") for name, weight in weights.items()}

    base = change_weights(prepared.base, folder / "base", spoil)
    return on_model(spec, base), "not a number"


@pytest.mark.parametrize("recipe", ONE_OF_EACH_FAMILY)
def test_a_model_of_another_family_is_named(
    recipe: str, prepared: Prepared, tmp_path: Path
) -> None:
    families = {family_of(name) for name in (recipe, prepared.name)}
    if len(families) == 1:
        return
    other = tmp_path / "base"
    TASKS[recipe].model(other)
    # By another tokenizer it would be refused first.
    shutil.copy2(prepared.base / "tokenizer.json", other)
    spec = on_model(prepared.spec(f"other-{recipe}"), other)
    with pytest.raises(UserError, match=r"The recipe trains .* but .* holds a"):
        train_here(spec)


def family_of(name: str) -> str:
    task = TASKS[name]
    return settings_of(recipe=task.recipe, **task.checkpoint).family


def test_the_gate_promotes_what_was_learnt_by_the_recipes_own_metric(
    prepared: Prepared, whole: TrainingSpec, tmp_path: Path
) -> None:
    output = tmp_path / "evaluation"
    spec = EvaluationSpec(
        base=ModelSource(path=str(prepared.base), fingerprint="base"),
        candidate=ModelSource(path=whole.export_folder, fingerprint="candidate"),
        shards=str(prepared.shards_folder),
        shard_stats=prepared.shards,
        output=str(output),
        # All held-out examples: one split in ten is fewer than the gate needs otherwise.
        settings=EvaluationSettings(held_out_tokens=None, general_tokens=200),
        recipe=whole.training,
    )
    lines: list[str] = []
    evaluate(spec, lines.append)
    table = pq.read_table(output / "scores.parquet")
    result = json.loads((output / "result.json").read_text())
    name = f"held_out_{result['metric']['name']}"
    base, candidate = (result["metrics"][name][role]["value"] for role in ("base", "candidate"))
    higher = result["metric"]["higher_is_better"]
    is_better = (candidate > base) if higher else (candidate < base)
    assert is_better == (prepared.name not in ANSWERS_NOTHING)
    verdict = judge(
        table,
        result,
        GateSettings(general_tolerance=20.0),
        candidate="candidate",
        incumbent=None,
        look=1,
        readable=0,
    )
    outcomes = {reason.outcome for reason in verdict.reasons}
    assert outcomes <= {"no_incumbent", "too_few_documents"}, verdict.summary
    assert np.isfinite(table["score_candidate"].to_numpy()).all()
