"""How one model is spread over workers: FSDP2, hybrid sharding, tensor parallelism."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from recipes.device import device_of
from recipes.distributed.tensor_parallel import split_matrices
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.settings.sections import Precision


def shard(model: TrainableModel, workers: Workers, replicas: int, precision: Precision) -> None:
    """Split parameters, gradients and optimizer state over the workers, layer by layer.

    Args:
        model: changed in place; with one worker it stays as it is.
        workers: all workers of the run.
        replicas: groups that each hold the whole model (hybrid sharding); 1 shards over all.
        precision: on a GPU, bfloat16 also travels between workers as such.

    Raises:
        UserError: the model's matrices cannot be split as `workers.tensor_parallel` asks.
    """
    if workers.count == 1:
        return
    mesh = _mesh(workers, replicas)
    if workers.tensor_parallel > 1:
        split_matrices(model, mesh["tensor"])
    shares = mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]
    narrow = precision == "bfloat16" and device_of(workers.device).sends_bfloat16
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if narrow else None, reduce_dtype=torch.float32
    )
    for layer in model.network.layers:
        fully_shard(layer, mesh=shares, mp_policy=policy)
    fully_shard(model, mesh=shares, mp_policy=policy)


def _mesh(workers: Workers, replicas: int) -> DeviceMesh:
    sizes = {
        "replicate": replicas,
        "shard": workers.dp_size // replicas,
        "tensor": workers.tensor_parallel,
    }
    names = tuple(name for name in sizes if name == "shard" or sizes[name] > 1)
    return init_device_mesh(
        workers.device.type, tuple(sizes[name] for name in names), mesh_dim_names=names
    )
