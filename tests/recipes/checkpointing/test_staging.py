"""Copies of the training state that the next steps do not touch."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from recipes.checkpointing.checkpoint import StagingBuffers
from tests.recipes.conftest import fake_group


def test_a_copy_for_a_checkpoint_stays_on_the_host() -> None:
    """A mesh of another device than the host's memory, as that of a GPU is."""
    with fake_group(2):
        mesh = DeviceMesh("meta", [0, 1], _init_backend=False)
        spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(torch.Size([4, 2]), (2, 1), torch.float32))
        held = DTensor(torch.arange(4.0).view(2, 2), spec, requires_grad=False)
        copied = StagingBuffers().copy({"weight": held}, None)["weight"]
    assert copied.to_local().device.type == "cpu" and copied.to_local().equal(held.to_local())
    assert (copied.shape, copied.placements) == (held.shape, held.placements)
