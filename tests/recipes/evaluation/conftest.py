"""The specification of an evaluation of tiny models on tiny shards."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from artifacts.shards.format import ShardStats
from recipes.evaluation.settings import EvaluationSettings, GenerationSettings, ModelSource
from recipes.evaluation.spec import EvaluationSpec
from tests.tiny import tiny_base_model

SETTINGS = EvaluationSettings(
    held_out_tokens=2_000,
    document_tokens=100,
    minimum_documents=8,
    general_tokens=4_000,
    generation=GenerationSettings(samples=1, prompt_tokens=8, new_tokens=6),
)

MakeSpec = Callable[..., EvaluationSpec]


@pytest.fixture(scope="session")
def candidate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another tiny model."""
    folder = tmp_path_factory.mktemp("candidate") / "model"
    tiny_base_model(folder, seed=1)
    return folder


@pytest.fixture
def make_evaluation(
    tmp_path: Path, base_model: Path, candidate: Path, shards_folder: Path, shards: ShardStats
) -> MakeSpec:
    def make(**changes: Any) -> EvaluationSpec:
        settings = SETTINGS.model_copy(update=changes.pop("settings", {}))
        fields = {
            "base": ModelSource(path=base_model, fingerprint="base"),
            "candidate": ModelSource(path=candidate, fingerprint="candidate"),
            "shards": shards_folder,
            "shard_stats": shards,
            "output": tmp_path / "output",
            "settings": settings,
        }
        return EvaluationSpec(**(fields | changes))

    return make
