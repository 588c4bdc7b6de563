"""Faults of the inputs end a run with one clear message before the first step."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import T5Config

from artifacts.errors import DamagedArtifact, UserError
from artifacts.program.entry import read_spec
from artifacts.shards.format import ShardStats
from recipes.distributed.workers import Workers
from recipes.model.base_model import check_row_length
from recipes.spec import TrainingSpec
from recipes.training.setup import check_inputs
from tests.recipes.conftest import (
    SpecMaker,
    finish,
    forked_workers,
    launcher,
    on_model,
    planned,
    run,
    train_here,
)
from tests.tiny import change_config


def refuse(spec: TrainingSpec, error: type[UserError] = UserError) -> str:
    """The message that training ends with."""
    with pytest.raises(error) as refusal:
        train_here(spec)
    return str(refusal.value)


@pytest.mark.fault(
    "checkpoint",
    "shards of another tokenizer",
    sees="that the tokenizers differ, and which stage to materialize",
    then="nothing is trained",
)
def test_shards_of_another_tokenizer_are_refused_once_by_all_workers(make_spec: SpecMaker) -> None:
    spec = make_spec()
    shards = spec.shards.model_copy(update={"tokenizer_sha256": "0" * 64})
    code, output = run(spec.model_copy(update={"shards": shards}), launcher(2))
    assert code == 1
    message = output.splitlines()[-1]
    assert message.startswith("The shards in") and output.count("The shards in") == 1
    assert "tokenized with another tokenizer" in message and "Traceback" not in output
    assert "Materialize `tokenized_shards` again" in message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_base_model_without_a_file_is_to_be_made_again(
    make_spec: SpecMaker, tmp_path: Path, name: str
) -> None:
    spec = make_spec()
    folder = Path(shutil.copytree(spec.base_model_folder, tmp_path / "model"))
    (folder / name).unlink()
    message = refuse(on_model(spec, folder))
    assert f"has no {name}. Materialize `base_model` again" in message


@pytest.mark.fault("checkpoint", "a shard missing", sees="the file", then="nothing is trained")
def test_a_missing_shard_is_named(make_spec: SpecMaker, tmp_path: Path) -> None:
    spec = make_spec()
    folder = tmp_path / "shards"
    shutil.copytree(spec.shards_folder, folder)
    (folder / "train-00001.tokens").unlink()
    moved = spec.model_copy(update={"shards_folder": str(folder)})
    assert "train-00001.tokens is absent" in refuse(moved, DamagedArtifact)


@pytest.mark.fault(
    "checkpoint",
    "a token outside the vocabulary",
    sees="shard and token",
    then="found before the first step",
)
def test_a_token_outside_the_vocabulary_is_found_before_the_first_step(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    """Also by the second of two workers, whose part it is in: the first one says it."""
    spec = make_spec()
    folder = Path(shutil.copytree(spec.shards_folder, tmp_path / "shards"))
    tokens = folder / "train-00001.tokens"
    tokens.write_bytes(tokens.read_bytes()[:-2] + b"\xff\xff")
    moved = spec.model_copy(update={"shards_folder": str(folder)})
    with forked_workers(moved, 2) as workers:
        ends = [finish(worker) for worker in workers]
    assert [code for code, _ in ends] == [1, 1]
    for message in (refuse(moved, DamagedArtifact), ends[0][1]):
        assert "The shard train-00001" in message and "token 65535" in message
    assert not (Path(spec.run_folder) / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tokens": 1}, "`checkpoint.budget.tokens` is 1, less than the"),
        (
            {"tokens": 3_000, "warmup_steps": 500},
            "`checkpoint.schedule.warmup_steps` is 500, but the run has",
        ),
    ],
)
def test_less_than_a_step_or_than_the_warm_up_is_refused(
    make_spec: SpecMaker, settings: dict[str, int], told: str
) -> None:
    assert told in refuse(make_spec(**settings))


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions", "n_ctx"])
def test_every_familys_name_for_positions_is_known(key: str) -> None:
    check_row_length(128, {key: 128})
    with pytest.raises(UserError, match="longer than the 128 positions"):
        check_row_length(129, {"text_config": {key: 128}})
    check_row_length(129, T5Config(n_positions=128).to_dict())


def test_a_batch_that_workers_cannot_share_is_refused(make_spec: SpecMaker) -> None:
    three = Workers(rank=0, count=3, device=torch.device("cpu"))
    with pytest.raises(UserError, match="4 rows, which 3 workers cannot share evenly"):
        check_inputs(planned(make_spec(global_batch_size=4), 3), three)


def test_rows_longer_than_the_models_positions_or_window_are_refused(
    make_spec: SpecMaker, tmp_path: Path
) -> None:
    spec = make_spec()
    shards = ShardStats.model_validate(spec.shards.model_dump() | {"sequence_length": 4096})
    assert "256 positions" in refuse(spec.model_copy(update={"shards": shards}))
    folder = change_config(Path(spec.base_model_folder), tmp_path / "model", sliding_window=32)
    message = refuse(on_model(spec, folder))
    assert "Rows of 64 tokens are longer than the base model's sliding window of 32" in message
    # As Qwen2 is published: it has a window, and does not use it.
    check_row_length(64, {"sliding_window": 32, "use_sliding_window": False})
    check_row_length(32, {"sliding_window": 32})


def test_a_spec_with_a_wrong_key_is_named(tmp_path: Path, make_spec: SpecMaker) -> None:
    path = tmp_path / "spec.json"
    make_spec().write(path)
    path.write_text(path.read_text().replace('"learning_rate"', '"learning_rat"'))
    with pytest.raises(UserError, match=r": training.optimizer.learning_rat: "):
        read_spec(str(path), TrainingSpec)
