"""A job that succeeded counts only with everything that its artifact needs."""

import json
from pathlib import Path

import pytest

from artifacts.shards.format import ShardStats
from llm_assets.runners.google_cloud import missing_of_training
from recipes.settings import training_settings
from recipes.spec import TrainingSpec

RECORDS = ("result.json", "seen.parquet", "trained.parquet")
WHOLE = ("config.json", "tokenizer.json", "model.safetensors")
PARTS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def spec(tmp_path: Path) -> TrainingSpec:
    """A training whose job left its records and no model."""
    for name in RECORDS:
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text("{}")
    return TrainingSpec.model_construct(
        run_id="run",
        shards=ShardStats.model_construct(),
        run_folder=str(tmp_path / "run"),
        export_folder=str(tmp_path / "model"),
        training=training_settings({}),
    )


def leave(spec: TrainingSpec, *names: str) -> Path:
    folder = Path(spec.export_folder)
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("name", [*RECORDS, *WHOLE])
def test_every_file_that_the_artifact_needs_is_asked_for(spec: TrainingSpec, name: str) -> None:
    leave(spec, *WHOLE)
    folder = spec.run_folder if name in RECORDS else spec.export_folder
    Path(folder, name).unlink()
    assert missing_of_training(spec) == [f"{folder}/{name}"]


def test_of_weights_in_parts_every_part_is_needed(spec: TrainingSpec) -> None:
    folder = leave(spec, "config.json", "tokenizer.json", *PARTS)
    index = {"weight_map": {"embeddings": PARTS[0], "head": PARTS[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert missing_of_training(spec) == []
    (folder / PARTS[1]).unlink()
    assert missing_of_training(spec) == [f"{folder}/{PARTS[1]}"]
