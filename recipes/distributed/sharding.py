"""How one model is spread over workers: FSDP2, hybrid sharding, tensor parallelism.

Tensor parallelism splits every matrix of a decoder over neighboring workers (Shoeybi et al.,
"Megatron-LM", 2019). Queries, keys, values and the feed-forward's inner part are split by rows,
what follows them by columns, so that a layer communicates twice each way. Embedding and output
matrix are split by vocabulary; the loss is divided by positions, for which the output matrix is
gathered.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, parallel

from artifacts.errors import UserError
from recipes.device import device_of
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder import Decoder, DecoderShape, summed_cross_entropy
from recipes.settings import Precision


def split_matrices(model: TrainableModel, mesh: DeviceMesh) -> None:
    """Turn every parameter into a DTensor on a one-dimensional mesh, in place.

    Raises UserError where the model is not of this project's decoder, or its sizes not divisible.
    """
    network = decoder_of(model, "tensor_parallel")
    _check_divisible(network.shape, mesh.size())
    alike = Replicate()
    columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    plan: dict[str, parallel.ParallelStyle] = {
        "self_attn": parallel.PrepareModuleInput(
            input_layouts=(alike, None, None), desired_input_layouts=(alike, None, None)
        ),
        "self_attn.q_proj": columns,
        "self_attn.k_proj": columns,
        "self_attn.v_proj": columns,
        "self_attn.o_proj": rows,
        "mlp": parallel.PrepareModuleInput(input_layouts=(alike,), desired_input_layouts=(alike,)),
        "mlp.gate_proj": columns,
        "mlp.up_proj": columns,
        "mlp.down_proj": rows,
    }
    # Without a source of the data: all workers read the same weights, so none has to send its own.
    for layer in network.layers:
        parallel.parallelize_module(layer, mesh, plan, src_data_rank=None)
    if hasattr(network.model, "embed_tokens"):
        embedding = {"embed_tokens": parallel.RowwiseParallel(input_layouts=alike)}
        parallel.parallelize_module(network.model, mesh, embedding, src_data_rank=None)
    if hasattr(network, "lm_head"):
        _distribute(network.lm_head, mesh, Shard(0))
    for module in network.modules():
        _distribute(module, mesh, Replicate())
    model.loss = split_cross_entropy


def decoder_of(model: TrainableModel, setting: str) -> Decoder:
    """The decoder that a setting of `checkpoint.placement` divides; raises UserError of others."""
    if not isinstance(model.network, Decoder):
        raise UserError(
            f"`checkpoint.placement.{setting}` splits Llama-shaped models only (Llama, Mistral, "
            "Qwen2, Qwen3); this one runs through transformers. Set it to 1."
        )
    return model.network


def split_cross_entropy(hidden: Tensor, head_weight: DTensor, targets: Tensor) -> Tensor:
    """`summed_cross_entropy` of hidden states that every worker of the mesh has alike, with an
    output matrix that is split by vocabulary."""
    mesh = head_weight.device_mesh
    # Every worker's positions add to the gradient of the whole matrix.
    weight = head_weight.full_tensor(grad_placements=[Partial()])
    loss = summed_cross_entropy(
        _my_part(hidden.flatten(0, 1), mesh)[None], weight, _my_part(targets.flatten(), mesh)[None]
    )
    return DTensor.from_local(loss, mesh, [Partial()], run_check=False).full_tensor()


def _my_part(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    tensor = DTensor.from_local(rows, mesh, [Replicate()], run_check=False)
    return tensor.redistribute(placements=[Shard(0)]).to_local()


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Replicate | Shard) -> None:
    """Make DTensors of a module's own parameters that are none yet."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not isinstance(parameter, DTensor):
            split = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(split))


def _check_divisible(shape: DecoderShape, degree: int) -> None:
    sizes = {
        "attention heads": shape.heads,
        "key and value heads": shape.key_value_heads,
        "inner feed-forward units": shape.intermediate_size,
    }
    for name, size in sizes.items():
        if size % degree:
            raise UserError(
                f"`checkpoint.placement.tensor_parallel` is {degree}, which does not divide the "
                f"model's {size} {name}. Choose a divisor of {size}, or 1."
            )


def shard(model: TrainableModel, workers: Workers, replicas: int, precision: Precision) -> None:
    """Split parameters, gradients and optimizer state over the workers, layer by layer, in place.

    Several replicas each hold the whole model, or this worker's stage of it (hybrid sharding). On a
    GPU, bfloat16 also travels between workers as such. Raises UserError where matrices cannot be
    split as `workers.tensor_parallel` asks.
    """
    if workers.count == 1:
        return
    sizes = {
        "stage": workers.pipeline_parallel,
        "replicate": replicas,
        "shard": workers.dp_size // replicas,
        "tensor": workers.tensor_parallel,
    }
    # Only the directions that are used, and always the one that FSDP2 shards over.
    used = {name: size for name, size in sizes.items() if name == "shard" or size > 1}
    mesh = init_device_mesh(workers.device.type, tuple(used.values()), mesh_dim_names=tuple(used))
    if workers.tensor_parallel > 1:
        split_matrices(model, mesh["tensor"])
    shares = mesh["replicate", "shard"] if replicas > 1 else mesh["shard"]
    narrow = precision != "float32" and device_of(workers.device).sends_bfloat16
    # What flows between layers stays in float32, as on one GPU; they narrow it where they multiply.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if narrow else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for module in model.modules() if narrow else ():
        if isinstance(module, nn.Embedding):
            # The residual stream begins with it.
            module.register_forward_hook(lambda *call: call[-1].float())
    # Bottom up, as FSDP2 asks: the last call takes what no layer has.
    for layer in model.network.layers:
        fully_shard(layer, mesh=shares, mp_policy=policy)
    fully_shard(model, mesh=shares, mp_policy=policy)
