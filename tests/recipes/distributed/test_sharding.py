"""How a model is spread over workers, on a fake group: types are real, values are not."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from recipes.data.batch import Batch
from recipes.device import Device, mixed_precision
from recipes.distributed.sharding import shard
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel, TransformersNetwork, load_model
from tests.recipes.conftest import REPOSITORY, fake_group
from tests.recipes.model.architectures import tiny_config

PROCESSES = 8


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """The first of eight workers, of which the others are never heard of; weights travel as on a
    GPU."""
    monkeypatch.setattr(Device, "sends_bfloat16", True)
    with fake_group(PROCESSES) as made:
        yield made


def gemma(base_model: Path) -> TrainableModel:
    """A model that runs through transformers."""
    config = tiny_config(CONFIG_MAPPING["gemma"], vocab_size=512)
    return TrainableModel(TransformersNetwork(AutoModelForCausalLM.from_config(config)))


@pytest.mark.parametrize("make", [load_model, gemma])
def test_what_flows_between_layers_is_in_float32_and_weights_travel_in_bfloat16(
    base_model: Path, workers: Workers, make
) -> None:
    model = make(base_model)
    shard(model, workers, 1, "bfloat16")
    flowing, weights = set(), set()

    def note(layer: torch.nn.Module, arguments: tuple[object, ...]) -> None:
        tensors = (x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor))
        flowing.update(tensor.dtype for tensor in tensors if tensor.is_floating_point())
        weights.update(parameter.dtype for parameter in layer.parameters())

    for layer in model.network.layers:
        layer.register_forward_pre_hook(note)
    tokens = torch.zeros((1, 64), dtype=torch.long)
    batch = Batch(tokens, tokens, torch.arange(64)[None], tokens)
    with mixed_precision("bfloat16", workers.device):
        model(batch)
    assert flowing == {torch.float32} and weights == {torch.bfloat16}


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_worker_reads_its_part_of_every_weight(
    base_model: Path, workers: Workers, replicas: int
) -> None:
    """The first; that the others read theirs, real processes show by their losses."""
    whole = load_model(base_model).state_dict()
    model = load_model(base_model, reads=False)
    assert all(parameter.is_meta for parameter in model.parameters())
    shard(model, workers, replicas, "float32")
    model.read_weights(workers.device)
    held = {name: tensor.to_local() for name, tensor in model.state_dict().items()}
    assert held.keys() == whole.keys()
    for name, tensor in held.items():
        assert tensor.equal(whole[name].chunk(PROCESSES // replicas)[0]), name


@pytest.mark.soak
def test_no_worker_of_many_holds_an_8b(tmp_path: Path) -> None:
    """Of 64; the file has holes in the place of 16 GB of weights, which are read as zeros."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.recipes.distributed.load_8b", str(tmp_path)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["parameters"] == 8_030_261_248
    assert found["read"] == pytest.approx(found["parameters"] / 64, rel=0.01)
    assert found["peak_gb"] < 1.5


def test_what_workers_tell_each_other_needs_no_device(workers: Workers) -> None:
    """On a GPU, a sum there would wait until it has computed all that it was given."""
    elsewhere = Workers(0, PROCESSES, torch.device("meta"))
    assert elsewhere.sum(3.0, 4.0) == [3.0, 4.0], "the other seven are never heard of"
