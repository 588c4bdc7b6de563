"""Gradients that are no numbers or far above the recent ones are not used, unless they stay."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from artifacts.program.entry import Interrupted
from artifacts.shards.shard_set import ShardSet
from recipes.data.reader import DataOrder
from recipes.data.records import SEEN_NAME, TRAINED_NAME, LineageRecord
from recipes.optimization import GradientGuard
from recipes.sections import OptimizerSettings
from recipes.spec import TrainingSpec, read_metrics
from tests.recipes.conftest import SpecMaker, course, on_model, train_here
from tests.tiny import change_config, change_weights, tiny_shards, tiny_texts

DOCUMENTS = 60


@pytest.fixture
def poisoned(make_spec: SpecMaker, tmp_path: Path) -> TrainingSpec:
    """A run in which one token's embedding is not a number."""
    spec = make_spec("poisoned", steps=30, stop_after_skips=8)

    def poison(weights: dict[str, torch.Tensor]) -> None:
        embeddings = weights["model.embed_tokens.weight"]
        weights["lm_head.weight"] = embeddings.clone()
        embeddings[_rare_token(spec)] = torch.nan

    untied = change_config(
        Path(spec.base_model_folder), tmp_path / "untied", tie_word_embeddings=False
    )
    return on_model(spec, change_weights(untied, tmp_path / "model", poison))


def _rare_token(spec: TrainingSpec) -> int:
    """A token of a few of the run's batches and of no validation row."""
    train = ShardSet(Path(spec.shards_folder), spec.shards, "train")
    validation = ShardSet(Path(spec.shards_folder), spec.shards, "validation")
    validated = {int(token) for tokens, _ in validation for token in tokens}
    order = DataOrder.of(spec)
    batches = [
        {int(token) for row in order.rows(4 * step, 4) for token in train[row][0]}
        for step in range(30)
    ]
    counts = {
        token: sum(token in batch for batch in batches)
        for token in set().union(*batches) - validated
    }
    return max(counts, key=lambda token: (counts[token] <= 5, counts[token]))


@pytest.mark.fault(
    "checkpoint",
    "a batch whose gradient is not a number",
    sees="the step, and that it was skipped",
    then="the weights stay unchanged; training continues and can be resumed",
)
def test_a_batch_that_is_not_a_number_is_skipped_and_counted(poisoned: TrainingSpec) -> None:
    spec = poisoned
    lines: list[str] = []
    result = train_here(spec, lines.append)
    output = "\n".join(lines)
    history = read_metrics(Path(spec.run_folder))
    skipped = [line["step"] for line in history if line["skipped"]]
    assert result.skipped_steps == len(skipped) > 0
    trained = pq.read_table(f"{poisoned.run_folder}/{TRAINED_NAME}")["step"].to_pylist()
    assert set(trained) == set(range(1, result.steps + 1)) - set(skipped)
    for step in skipped:
        assert f"step {step} was skipped: a gradient that is not finite" in output
    assert result.validation["end"] < result.validation["start"]


def test_a_run_saved_at_a_skipped_step_goes_on_from_it(
    poisoned: TrainingSpec, tmp_path: Path
) -> None:
    whole = poisoned.model_copy(update={"run_folder": str(tmp_path / "whole")})
    train_here(whole)

    def stop_at_the_first_skipped_step(line: str) -> None:
        if "(1 skipped so far)" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train_here(poisoned, stop_at_the_first_skipped_step)
    lines: list[str] = []
    train_here(poisoned, lines.append)

    assert any(line.startswith("Going on from the checkpoint of step") for line in lines)
    assert repr(course(poisoned)) == repr(course(whole)), "not a number is not equal to itself"


@pytest.mark.fault(
    "checkpoint",
    "gradients that are not numbers, in several steps in a row",
    sees="since which step, and which settings to change",
    then="training ends with the earlier weights, which the gate rejects",
)
def test_too_many_skipped_steps_in_a_row_are_enough() -> None:
    guard, settings = GradientGuard(), OptimizerSettings(stop_after_skips=3)
    for step in range(20):
        guard.accept(1.0 + step / 100)
    assert guard.largest_norm(10.0) == pytest.approx(10.95)
    assert "far above the recent" in guard.skip(21, 50.0, settings)[0]
    assert not guard.skip(22, float("nan"), settings)[1]
    why, is_over = guard.skip(23, float("nan"), settings)
    assert is_over and "at step 23: no step since 21 had a usable gradient" in why


@pytest.fixture
def another_kind(make_spec: SpecMaker, tmp_path: Path) -> Callable[[str], TrainingSpec]:
    """Runs that read one sentence over and over, and then a manual.

    Nothing has been seen of either, and the sentence came last, so it is read first.
    """
    texts = tiny_texts(DOCUMENTS)
    trained = [number for number in range(DOCUMENTS) if number % 10 < 8]
    for number in trained[::2]:
        texts[number] = "The valve opens. " * 58
    folder = tmp_path / "shards"
    plain = make_spec("plain")
    stats = tiny_shards(folder, Path(plain.base_model_folder), texts)
    path = folder / "train-00000.documents.parquet"
    table = pq.read_table(path)
    arrived = pa.array([2] * len(table), pa.int64())
    pq.write_table(table.set_column(table.column_names.index("slice"), "slice", arrived), path)
    LineageRecord.none().write(str(tmp_path / SEEN_NAME))
    rows = next(shard.rows for shard in stats.shards if shard.name == "train-00000")

    def make(name: str) -> TrainingSpec:
        settings = {"learning_rate": 0.01, "skip_gradient_above": 5.0, "accept_after_skips": 3}
        spec = make_spec(name, steps=rows // 4 + 12, **settings)
        changes = {"shards_folder": str(folder), "shards": stats}
        return spec.model_copy(update=changes | {"seen": str(tmp_path / SEEN_NAME)})

    return make


@pytest.mark.fault(
    "checkpoint",
    "text of another kind, with gradients far above the recent ones",
    sees="which steps were skipped, and from which step on such gradients are used",
    then="the text is learned; a run that is resumed meanwhile has the same losses",
)
def test_text_of_another_kind_is_learnt_after_a_few_skipped_steps(
    another_kind: Callable[[str], TrainingSpec],
) -> None:
    spec, lines = another_kind("whole"), []
    result = train_here(spec, lines.append)
    skipped = [line["step"] for line in read_metrics(spec.run_folder) if line["skipped"]]
    assert result.diverged is None and result.skipped_steps == len(skipped) == 3
    assert sum("3 in a row are text of another kind" in line for line in lines) == 1
    losses = {line["step"]: line["loss"] for line in read_metrics(spec.run_folder)}
    assert losses[result.steps] < losses[skipped[0]] / 2

    resumed = another_kind("resumed")

    def stop_between_skips(line: str) -> None:
        if "(2 skipped so far)" in line:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train_here(resumed, stop_between_skips)
    train_here(resumed)
    assert course(resumed) == course(spec)


def test_a_training_that_diverged_ends_with_a_model_for_the_gate_and_the_reason(
    make_spec: SpecMaker,
) -> None:
    spec = make_spec("diverged", steps=30, skip_gradient_above=1.01, stop_after_skips=1)
    result = train_here(spec)
    assert result.diverged and "the last one a gradient norm of" in result.diverged
    assert 16 < result.steps < 30
    assert (Path(spec.export_folder) / "model.safetensors").exists()
    assert train_here(spec) == result, "it is finished"
