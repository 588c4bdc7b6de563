"""Every matrix of a decoder split over neighboring workers (Shoeybi et al., "Megatron-LM", 2019).

Queries, keys, values and the feed-forward's inner part are split by rows, what follows them by
columns, so that a layer communicates twice each way. Embedding and output matrix are split by
vocabulary; the loss is divided by positions, for which the output matrix is gathered.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from artifacts.errors import UserError
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder.loss import summed_cross_entropy
from recipes.model.decoder.network import Decoder, DecoderShape


def split_matrices(model: TrainableModel, mesh: DeviceMesh) -> None:
    """Turn every parameter into a DTensor on a one-dimensional mesh; the model is changed in place.

    Raises:
        UserError: the model is not of this project's decoder, or its sizes are not divisible.
    """
    network = model.network
    if not isinstance(network, Decoder):
        raise UserError(
            "`checkpoint.placement.tensor_parallel` splits Llama-shaped models only (Llama, "
            "Mistral, Qwen2, Qwen3, Phi-3); this one runs through transformers. Set it to 1."
        )
    _check_divisible(network.shape, mesh.size())
    for layer in network.layers:
        parallelize_module(layer, mesh, _layer_plan(), src_data_rank=None)
    parallelize_module(
        network.model,
        mesh,
        {"embed_tokens": RowwiseParallel(input_layouts=Replicate())},
        src_data_rank=None,
    )
    if not network.shape.tied_embeddings:
        _distribute(network.lm_head, mesh, Shard(0))
    for module in network.modules():
        _distribute(module, mesh, Replicate())
    model.loss = split_cross_entropy


def split_cross_entropy(hidden: Tensor, head_weight: DTensor, targets: Tensor) -> Tensor:
    """`summed_cross_entropy` of hidden states that every worker of the mesh has alike.

    Args:
        hidden: shape (rows, sequence_length, hidden_size).
        head_weight: shape (vocabulary, hidden_size), split by vocabulary.
        targets: shape (rows, sequence_length).
    """
    mesh = head_weight.device_mesh
    # Every worker's positions add to the gradient of the whole matrix.
    weight = head_weight.full_tensor(grad_placements=[Partial()])
    loss = summed_cross_entropy(
        _my_part(hidden.flatten(0, 1), mesh)[None], weight, _my_part(targets.flatten(), mesh)[None]
    )
    return DTensor.from_local(loss, mesh, [Partial()], run_check=False).full_tensor()


def _my_part(rows: Tensor, mesh: DeviceMesh) -> Tensor:
    whole = DTensor.from_local(rows, mesh, [Replicate()], run_check=False)
    return whole.redistribute(placements=[Shard(0)]).to_local()


def _layer_plan() -> dict[str, ParallelStyle]:
    alike = Replicate()
    return {
        "self_attn": PrepareModuleInput(
            input_layouts=(alike, None, None), desired_input_layouts=(alike, None, None)
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp": PrepareModuleInput(input_layouts=(alike,), desired_input_layouts=(alike,)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }


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
    for what, size in sizes.items():
        if size % degree:
            raise UserError(
                f"`checkpoint.placement.tensor_parallel` is {degree}, which does not divide the "
                f"model's {size} {what}. Choose a divisor of {size}, or 1."
            )
