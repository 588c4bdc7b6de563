"""Training with the layers' products in float8."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from artifacts.errors import UserError
from recipes.model.causal_model import TrainableModel
from recipes.training.setup import multiply_in_float8
from tests.recipes.conftest import SpecMaker, losses, on_model, train_here
from tests.recipes.model.architectures import tiny_kind
from tests.tiny import save_random_model


def test_it_takes_the_course_of_bfloat16_and_leaves_usual_weights(make_spec: SpecMaker) -> None:
    """The numbers that a GPU would multiply, multiplied in another type."""
    narrow, usual = (
        make_spec(name, steps=8, precision=name, learning_rate=1e-2)
        for name in ("float8", "bfloat16")
    )
    result = train_here(narrow)
    train_here(usual)
    assert result.validation["end"] < result.validation["start"]
    assert losses(narrow) != losses(usual)
    assert losses(narrow) == pytest.approx(losses(usual), rel=0.02)
    model = AutoModelForCausalLM.from_pretrained(Path(narrow.export_folder))
    with torch.no_grad():
        assert model(torch.arange(50)[None]).logits.isfinite().all()


def test_a_gpu_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    with pytest.raises(UserError, match="float8, which NVIDIA A100-SXM4-40GB does not multiply"):
        multiply_in_float8(TrainableModel(torch.nn.Module()), torch.device("cuda"))


@pytest.mark.parametrize("kind", ["gpt2", "odd"])
def test_a_model_of_which_it_would_multiply_nothing_is_refused(
    kind: str, make_spec: SpecMaker, base_model: Path, tmp_path: Path
) -> None:
    """GPT-2 has layers of a kind of its own; the other's sizes are no multiples of 16."""
    folder = tmp_path / "model"
    if kind == "gpt2":
        tiny_kind(kind, base_model, folder)
    else:
        shutil.copytree(base_model, folder)
        sizes = {"hidden_size": 72, "intermediate_size": 152, "head_dim": 18}
        config = AutoConfig.from_pretrained(folder, **sizes)
        save_random_model(folder, LlamaForCausalLM, config, {})
    with pytest.raises(UserError, match=r"float8, but no matrix .* multiples of 16\. Set it to"):
        train_here(on_model(make_spec(precision="float8"), folder))
