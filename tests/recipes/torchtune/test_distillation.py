"""torchtune's recipes of knowledge distillation: a model learns what another one knows."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from artifacts.errors import UserError
from artifacts.shards.format import ShardStats
from artifacts.shards.shard_set import ShardSet
from recipes.settings import training_settings
from recipes.spec import TrainingSpec, read_result
from tests.recipes.conftest import spec_in, train_here, train_together
from tests.recipes.model.architectures import tiny_config, write_tiny
from tests.tiny import tiny_base_model
from tests.tiny_models import far_model
from tests.tiny_tasks import SMALL

CONFIGS = {
    "knowledge_distillation_single_device": "llama3_2/8B_to_1B_KD_lora_single_device",
    "knowledge_distillation_distributed": "llama3_2/8B_to_1B_KD_lora_distributed",
}
Make = Callable[..., TrainingSpec]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    far_model(folder, seed=7)
    return folder


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("student")
    far_model(folder)
    return folder


@pytest.fixture
def make(
    tmp_path: Path, student: Path, shards_folder: Path, shards: ShardStats, teacher: Path
) -> Make:
    def spec(
        program: str = "knowledge_distillation_single_device",
        overrides: dict[str, Any] | None = None,
        **more: Any,
    ) -> TrainingSpec:
        settings = {
            "recipe": "torchtune",
            "run": program,
            "config": CONFIGS[program],
            "overrides": SMALL | (overrides or {}),
            "teacher": str(teacher),
            "budget": {"steps": 8},
        }
        folder = tmp_path / f"{program}-{more.get('placement', {}).get('workers', 1)}"
        return spec_in(folder, student, shards_folder, shards, training_settings(settings | more))

    return spec


def divergence(teacher: Path, student: Path, shards: ShardSet) -> float:
    """The Kullback-Leibler divergence of a student from its teacher, in nats per token."""
    tokens = torch.from_numpy(shards.read(np.arange(8)).tokens.astype(np.int64))
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (student, teacher)]
    with torch.no_grad():
        of_student, of_teacher = (model(tokens).logits.log_softmax(-1) for model in models)
    total = F.kl_div(of_student, of_teacher, log_target=True, reduction="sum")
    return float(total) / tokens.numel()


@pytest.mark.parametrize(
    "program",
    [
        "knowledge_distillation_single_device",
        pytest.param("knowledge_distillation_distributed", marks=pytest.mark.soak),
    ],
)
def test_by_its_teacher_alone_it_learns_what_that_knows(
    program: str, make: Make, student: Path, teacher: Path
) -> None:
    spec = make(program, {"kd_ratio": 1.0})
    train_here(spec)
    rows = spec.open_shards("validation")
    after = divergence(teacher, Path(spec.export_folder), rows)
    assert after < 0.8 * divergence(teacher, student, rows)


@pytest.mark.soak
def test_two_workers_take_the_steps_of_one(make: Make) -> None:
    program = "knowledge_distillation_distributed"
    one = make(program)
    two = make(program, {"batch_size": 2}, placement={"workers": 2})
    for spec, workers in ((one, 1), (two, 2)):
        train_together(spec, workers)
    assert one.content() == two.content()
    # What that recipe tells of a step is the loss of one worker's last batch.
    ends, others = (read_result(Path(spec.run_folder)) for spec in (one, two))
    assert ends is not None and others is not None
    assert others.validation == pytest.approx(ends.validation, rel=1e-3)


def test_the_teachers_content_decides_what_is_learnt_and_its_place_does_not(
    make: Make, teacher: Path, tmp_path: Path
) -> None:
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(teacher, moved)
    tiny_base_model(other, seed=1)
    assert make().content() == make(teacher=str(moved)).content()
    assert make().content() != make(teacher=str(other)).content()


def test_a_teacher_that_is_absent_or_speaks_otherwise_is_named(make: Make, tmp_path: Path) -> None:
    spec = make(teacher=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"`checkpoint.teacher`: .*nowhere is no Hugging Face"):
        spec.training.check_files()
    write_tiny(tiny_config(CONFIG_MAPPING["llama"], vocab_size=256), tmp_path / "small")
    with pytest.raises(UserError, match="has a vocabulary of 256 and the base model one of 512"):
        train_here(make(teacher=str(tmp_path / "small")))
    write_tiny(tiny_config(CONFIG_MAPPING["qwen2"], vocab_size=512), tmp_path / "qwen2")
    with pytest.raises(UserError, match=r"`teacher_model._component_` is .*llama3_1_8b, but"):
        train_here(make(teacher=str(tmp_path / "qwen2")))


def test_a_distillation_without_a_teacher_is_refused(make: Make) -> None:
    with pytest.raises(ValidationError, match="`teacher` is absent, the folder of the model"):
        make(teacher=None)
