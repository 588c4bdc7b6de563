"""The contract that every recipe has: learn, go on after any end, be measured, fail loudly."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from artifacts.errors import UserError
from artifacts.program.entry import Interrupted
from artifacts.program.lifetime import Interruption
from artifacts.shards.format import ShardStats
from llm_assets.gate.judge import judge
from llm_assets.gate.settings import GateSettings
from recipes.distributed.workers import join_workers
from recipes.evaluate import run as evaluate
from recipes.evaluation.settings import EvaluationSettings, ModelSource
from recipes.evaluation.spec import EvaluationSpec
from recipes.spec import TrainingSpec, read_result
from recipes.train import train
from tests.recipes.conftest import course, kill_at, launcher, run, settings_of, train_here
from tests.tiny_tasks import LONG, TASKS, example_shards

STEPS = 8


class Prepared:
    """A task's base model and shards."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.base, self.shards_folder = folder / "base", folder / "shards"
        self.checkpoint = TASKS[name].prepare(folder)
        self.shards: ShardStats = example_shards(self.shards_folder, self.base, TASKS[name])

    def spec(self, run_name: str, **training: Any) -> TrainingSpec:
        task = {k: v for k, v in self.checkpoint.items() if k != "budget"}
        defaults: dict[str, Any] = {"steps": STEPS, "precision": "float32"}
        if task["recipe"] == "torchtune":
            # Precision and learning rate are those of its own configuration.
            del defaults["precision"]
        else:
            defaults["learning_rate"] = 1e-2
        return TrainingSpec(
            run_id=run_name,
            shards_folder=str(self.shards_folder),
            shards=self.shards,
            base_model_folder=str(self.base),
            run_folder=str(self.folder / "runs" / run_name),
            export_folder=str(self.folder / "exports" / run_name),
            training=settings_of(**defaults | task | training),
            inputs={"base_model": "tiny", "tokenized_shards": self.name},
        )


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.soak] * (name in LONG)) for name in TASKS],
)
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return Prepared(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def whole(prepared: Prepared) -> TrainingSpec:
    """A run that nothing disturbed."""
    spec = prepared.spec("whole", validation={"every_steps": 4})
    train_here(spec)
    return spec


def weights(spec: TrainingSpec) -> dict[str, torch.Tensor]:
    return load_file(Path(spec.export_folder) / "model.safetensors")


def same(one: TrainingSpec, other: TrainingSpec) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(first[n].equal(second[n]) for n in first)


def test_it_learns(prepared: Prepared, whole: TrainingSpec) -> None:
    result = read_result(Path(whole.run_folder))
    assert result is not None
    assert result.validation["end"] < TASKS[prepared.name].learns * result.validation["start"]


def test_an_interrupted_run_goes_on_exactly(prepared: Prepared, whole: TrainingSpec) -> None:
    spec = prepared.spec("stopped", validation={"every_steps": 4})

    def terminate(line: str) -> None:
        if line.startswith(f"step 4 of {STEPS} · validation"):
            os.kill(os.getpid(), signal.SIGTERM)

    torch.set_num_threads(1)
    with pytest.raises(Interrupted):
        train(spec, join_workers(), Interruption(), terminate)
    train_here(spec)

    assert course(spec) == course(whole)
    assert same(spec, whole)


@pytest.mark.soak
def test_a_killed_run_goes_on_exactly(prepared: Prepared) -> None:
    whole, killed = (
        prepared.spec(name, steps=30, checkpointing={"every_steps": 6}) for name in ("long", "kill")
    )
    train_here(whole)
    kill_at(killed, 9)
    code, output = run(killed)
    assert code == 0, output
    assert course(killed) == course(whole)
    assert same(killed, whole)


@pytest.mark.soak
def test_two_workers_train_the_same_rows(prepared: Prepared, whole: TrainingSpec) -> None:
    if prepared.checkpoint["recipe"] == "torchtune":
        pytest.skip("of one device; those of several are in test_torchtune.py")
    spec = prepared.spec("shared", validation={"every_steps": 4})
    code, output = run(spec, launcher(2))
    assert code == 0, output
    assert [c[0] for c in course(spec)] == pytest.approx([c[0] for c in course(whole)], rel=1e-4)


def test_damaged_weights_end_the_training_with_a_reason(prepared: Prepared, tmp_path: Path) -> None:
    if prepared.spec("any").training.starts_from == "random":
        pytest.skip("it reads no weights")
    damaged = Prepared.__new__(Prepared)
    damaged.__dict__ |= prepared.__dict__ | {"base": tmp_path / "base", "folder": tmp_path}
    TASKS[prepared.name].model(damaged.base)
    file = damaged.base / "model.safetensors"
    save_file({n: w * float("nan") for n, w in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(UserError, match="not a number"):
        train_here(damaged.spec("damaged"))
    assert not (tmp_path / "exports" / "damaged").exists()


@pytest.mark.parametrize("recipe", TASKS)
def test_a_model_of_another_family_is_named(
    recipe: str, prepared: Prepared, make_other: Callable[[str], Path], tmp_path: Path
) -> None:
    families = {family_of(name) for name in (recipe, prepared.name)}
    if len(families) == 1:
        return
    other = tmp_path / "base"
    shutil.copytree(make_other(recipe), other)
    # By another tokenizer it would be refused first.
    shutil.copy2(prepared.base / "tokenizer.json", other)
    spec = prepared.spec(f"other-{recipe}").model_copy(update={"base_model_folder": str(other)})
    with pytest.raises(UserError, match=r"The recipe trains .* but .* holds a"):
        train_here(spec)


def family_of(name: str) -> str:
    task = TASKS[name]
    return settings_of(recipe=task.recipe, **task.checkpoint).family


@pytest.fixture(scope="module")
def make_other(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(recipe: str) -> Path:
        if recipe not in made:
            made[recipe] = tmp_path_factory.mktemp("other") / "base"
            TASKS[recipe].model(made[recipe])
        return made[recipe]

    return make


def test_the_gate_promotes_what_was_learnt_by_the_recipes_own_metric(
    prepared: Prepared, whole: TrainingSpec, tmp_path: Path
) -> None:
    output = tmp_path / "evaluation"
    spec = EvaluationSpec(
        base=ModelSource(path=str(prepared.base), fingerprint="base"),
        candidate=ModelSource(path=whole.export_folder, fingerprint="candidate"),
        shards=str(prepared.shards_folder),
        shard_stats=prepared.shards,
        shards_fingerprint="shards",
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
    assert (candidate > base) if higher else (candidate < base)
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
