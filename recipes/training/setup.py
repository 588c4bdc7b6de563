"""Before the first step: faults of the inputs, and the model ready to train, with its strategy."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, parallel

from artifacts.errors import DamagedArtifact, UserError
from artifacts.shards.shard_set import ShardSet
from recipes.device import device_of
from recipes.distributed.strategy import FullySharded, Strategy
from recipes.distributed.workers import Workers
from recipes.model.base_model import check_family, check_row_length
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder.network import (
    DECODER_MODEL_TYPES,
    TOKENS_IN_FLIGHT,
    Decoder,
    DecoderShape,
    summed_cross_entropy,
)
from recipes.model.lora import add_adapters
from recipes.objective import Objective
from recipes.optimization import Optimizers, build_optimizers
from recipes.settings import PlacementSettings, Precision, TrainingSettings, chosen
from recipes.spec import TrainingSpec

# What a training takes of the memory of each of its GPUs, by a reckoning.
# It decides whether activations are kept, refuses what cannot fit before anything is read, and
# says what took the memory where it ran out.
USABLE = 0.85
"""Of a GPU's memory; CUDA itself, buffers of messages and gaps between tensors take the rest."""
EAGER = 2
"""How many times as much a model of transformers keeps as a compiled decoder."""
MOST_WORKERS = 1024
"""The most workers that a refusal suggests."""
Reckoning = Callable[[int, int, bool], dict[str, float]]
"""`training_memory` of a run by the tokens of a pass, the workers, and whether activations stay."""


def training_memory(
    config: Any,
    training: TrainingSettings,
    parameters: int,
    trained: int,
    tokens: int,
    workers: int,
    keeps: bool,
) -> dict[str, float]:
    """Bytes on the GPU of one of `workers`, by what takes them, for a forward pass of so many
    tokens.

    The config is one of transformers; activations that are not kept are computed twice. On an H200,
    a model of 1B took 66.2 GB where this says 71.0, and one of 135M 39.7 where it says 41.3.
    """
    text = config.get_text_config()
    layers, hidden, vocabulary = text.num_hidden_layers, text.hidden_size, text.vocab_size
    inner = getattr(text, "intermediate_size", None) or 4 * hidden
    keys, times = hidden, EAGER
    if text.model_type in DECODER_MODEL_TYPES:
        head_dim = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
        keys, times = text.num_key_value_heads * head_dim, 1
    width = 4 if training.precision == "float32" else 2
    moments = 2 if training.optimizer.name == "adamw" else 1
    in_flight, degree = min(tokens, TOKENS_IN_FLIGHT["cuda"]), training.placement.tensor_parallel
    stages = training.placement.pipeline_parallel
    divided = max(workers // training.placement.replicas, 1)
    embeddings = vocabulary * hidden * (1 if text.tie_word_embeddings else 2)
    # Of several workers, each has the weights of two layers and of the embeddings at once.
    copied_count = parameters // stages if width == 2 else 0
    if divided > degree and stages == 1:
        copied_count = embeddings + 2 * max(parameters - embeddings, 0) // layers
    # Of each token and layer in float32 the residual stream, twice; in the type of the products
    # what both norms, the queries and the attention give, keys and values, and three times the
    # inner feed-forward.
    products = width * (4 * hidden + 2 * keys + 3 * inner) / degree
    of_a_layer = tokens * times * (8 * hidden + products)
    # The logits that exist at once, and the gradient of the output matrix. Where the tokens take
    # several turns, the product of each is added to a sum in float32.
    product = width + (8 if tokens > in_flight else 4 * (width < 4))
    logits = vocabulary * (width * in_flight / degree + product * hidden)
    # In float32: what is trained has a gradient and moments beside the weights, what is frozen has
    # neither.
    state = ((8 + 4 * moments) * trained + 4 * (parameters - trained)) / divided
    if stages > 1:
        # The schedule keeps a stage's weights and gradients whole until all passes are done.
        state += 4 * trained * (1 / (degree * stages) - 1 / divided)
    if strategy := training.placement.strategy:
        # What it holds at least.
        state = strategy.state_bytes(parameters, trained, moments, workers)
    # A stage of a pipeline has a part of the layers, and as many passes under way at once.
    activations = layers * of_a_layer
    if not keeps:
        # The layers' inputs. Logits are gone when the last layer is computed again.
        activations = layers * tokens * 4 * hidden + max(of_a_layer - logits, 0)
    return {
        "weights, gradients and optimizer state": state,
        "weights as they are multiplied": width * copied_count / degree,
        "logits": logits,
        "activations": activations,
    }


def described(memory: dict[str, float]) -> str:
    """What takes memory, in words, the largest first."""
    ordered = sorted(memory.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {size / 1e9:,.1f} GB" for name, size in ordered)


def check_memory(
    reckon: Reckoning,
    placement: PlacementSettings,
    row_tokens: int,
    workers: int,
    memory: float,
    keeps: bool = False,
) -> None:
    """Raise UserError where a training fits GPUs of so many bytes in no way in which it may be
    computed.

    It names what takes the memory, and what helps, the cheapest first. Activations are kept where
    the settings or the model let none be computed twice.
    """
    rows = placement.device_batch_size
    sizes = reckon(rows * row_tokens, workers, keeps)
    total = sum(sizes.values())
    # What may just fit is let through; what is advised below leaves room (USABLE).
    if total <= memory:
        return

    def fits(rows: int, workers: int, keeps: bool = keeps) -> bool:
        return sum(reckon(rows * row_tokens, workers, keeps).values()) <= USABLE * memory

    fewer_rows = next((n for n in range(rows - 1, 0, -1) if fits(n, workers)), None)
    doubled = (workers << n for n in range(1, MOST_WORKERS.bit_length()))
    count = next((n for n in doubled if fits(1, n)), None)
    remedy = "Shorten `tokenized_shards.sequence_length`, or choose a smaller `base_model`."
    if placement.activation_checkpointing is False and fits(rows, workers, keeps=False):
        remedy = "Set `checkpoint.placement.activation_checkpointing` to true."
    elif fewer_rows:
        remedy = f"Set `checkpoint.placement.device_batch_size` to {fewer_rows}."
    elif count:
        remedy = (
            f"It fits {count} workers with `checkpoint.placement.device_batch_size` at 1; fewer do "
            "with `checkpoint.lora`, which trains adapters alone."
        )
    how = "with activations kept" if keeps else "even where activations are computed twice"
    raise UserError(
        f"This training does not fit a GPU of {memory / 1e9:,.0f} GB: on each of {workers} "
        f"worker(s), with `checkpoint.placement.device_batch_size` at {rows}, it takes "
        f"{total / 1e9:,.0f} GB {how} ({described(sizes)}). {remedy}"
    )


OLDEST_CAPABILITY = (8, 9)
"""The compute capability from which GPUs multiply float8: L4, H100, H200 and later."""
MULTIPLE = 16
"""The sizes of a matrix have to be multiples of this to be multiplied in float8."""


def multiply_in_float8(model: TrainableModel, device: torch.device) -> None:
    """Change the layers of a model in place; each row of a matrix has a scale of its own.

    On a processor the same numbers are multiplied in another type, for trials. Raises UserError
    where the GPU has no such units, or no matrix of the model fits them.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        raise UserError(
            f"`checkpoint.precision` is float8, which {torch.cuda.get_device_name(device)} does "
            "not multiply; L4, H100, H200 and later do. Set it to bfloat16."
        )
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = model.network.layers
    if not any(isinstance(module, nn.Linear) and _fits(module) for module in layers.modules()):
        raise UserError(
            "`checkpoint.precision` is float8, but no matrix of this model's layers can be "
            "multiplied in it: that takes linear layers (torch's nn.Linear) whose sizes are "
            f"multiples of {MULTIPLE}. Set it to bfloat16."
        )
    config = Float8LinearConfig.from_recipe_name("rowwise")
    convert_to_float8_training(
        layers,
        config=replace(config, emulate=device.type == "cpu"),
        module_filter_fn=lambda module, name: _fits(module),
    )


def _fits(module: nn.Module) -> bool:
    assert isinstance(module, nn.Linear)
    return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0


# How one model is spread over workers: FSDP2, hybrid sharding, tensor parallelism.
# Tensor parallelism splits every matrix of a decoder over neighboring workers (Shoeybi et al.,
# "Megatron-LM", 2019). Queries, keys, values and the feed-forward's inner part are split by rows,
# what follows them by columns, so that a layer communicates twice each way. Embedding and output
# matrix are split by vocabulary; the loss is divided by positions, for which the output matrix is
# gathered.
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
    for layer in model.network.layers:
        fully_shard(layer, mesh=shares, mp_policy=policy)
    fully_shard(model, mesh=shares, mp_policy=policy)


def check_inputs(spec: TrainingSpec, workers: Workers) -> None:
    """Compare processes, shards, base model and settings; raises UserError on what does not fit."""
    planned = spec.training.placement.world_size
    if workers.count != planned:
        raise UserError(
            f"The run was planned for {planned} training process(es), but {workers.count} were "
            f"started. Start {planned}, or set `checkpoint.placement.workers` to {workers.count}."
        )
    base_model = Path(spec.base_model_folder)
    try:
        config = json.loads((base_model / "config.json").read_text())
        tokenizer_sha256 = hashlib.sha256((base_model / "tokenizer.json").read_bytes()).hexdigest()
    except FileNotFoundError as error:
        name = Path(error.filename).name
        raise UserError(
            f"The base model folder {base_model} has no {name}. Materialize `base_model` again."
        ) from None
    if tokenizer_sha256 != spec.shards.tokenizer_sha256:
        raise UserError(
            f"The shards in {spec.shards_folder} were tokenized with another tokenizer (SHA-256 "
            f"{spec.shards.tokenizer_sha256[:12]}…) than {base_model}/tokenizer.json "
            f"({tokenizer_sha256[:12]}…). Materialize `tokenized_shards` again."
        )
    if spec.shards.form != spec.training.form:
        raise UserError(
            f"The shards in {spec.shards_folder} hold {spec.shards.form}, but the recipe "
            f"{spec.training.recipe} learns from {spec.training.form}. Materialize "
            "`raw_corpus` and what follows with the sources' `examples` set."
        )
    # First of all, since the positions of a model of another family say nothing about its rows.
    check_family(base_model, spec.training.family)
    if longest := spec.training.longest_input(spec.shards.sequence_length):
        check_row_length(longest, config)
    _check_division(spec, workers)


def _check_division(spec: TrainingSpec, workers: Workers) -> None:
    placement = spec.training.placement
    replicas, degree = placement.replicas, placement.tensor_parallel
    stages = placement.pipeline_parallel
    if workers.count % (replicas * degree * stages):
        raise UserError(
            f"`checkpoint.placement.replicas` ({replicas}) times "
            f"`checkpoint.placement.tensor_parallel` ({degree}) times "
            f"`checkpoint.placement.pipeline_parallel` ({stages}) does not divide the "
            f"{workers.count} workers."
        )
    batch = spec.training.budget.global_batch_size
    shares = workers.count * workers.chips // (degree * stages)
    if batch % shares:
        kind, other = "chips", "another machine"
        if workers.chips == 1:
            kind, other = "workers", "another `checkpoint.placement.workers`"
        raise UserError(
            f"`checkpoint.budget.global_batch_size` is {batch} rows, which {shares} {kind} cannot "
            f"share evenly. Choose a multiple of {shares}, or {other}."
        )
    rows, share = placement.device_batch_size, batch // shares
    if stages > 1 and (share % rows or share // rows < stages):
        fitting = [n for n in range(1, share // stages + 1) if share % n == 0]
        remedy = (
            f"Set `checkpoint.placement.device_batch_size` to {fitting[-1]}."
            if fitting
            else f"Set `checkpoint.budget.global_batch_size` to {stages * shares * rows}."
        )
        raise UserError(
            f"A pipeline of {stages} stages needs at least {stages} passes of equal size in each "
            f"step, but its share of `checkpoint.budget.global_batch_size` is {share} rows, and a "
            f"pass takes `checkpoint.placement.device_batch_size` ({rows}) of them. {remedy}"
        )


def check_tokens(shard_sets: Iterable[ShardSet], folder: str, workers: Workers) -> None:
    """Raise DamagedArtifact for tokens outside the vocabulary; each worker reads a part of the
    shards.

    One pass at the speed of the disk, since a bad token would otherwise end a run in its middle.
    Shards in an object store are checked row by row when they are read.
    """
    if "://" in folder:
        return
    for shards in shard_sets:
        pairs = zip(shards.entries, shards.shards, strict=True)
        for entry, opened in itertools.islice(pairs, workers.rank, None, workers.count):
            largest = int(opened.tokens.max())
            if largest >= shards.stats.vocab_size:
                raise DamagedArtifact(
                    f"The shard {entry.name} in {folder} holds token {largest}, outside the "
                    f"vocabulary of {shards.stats.vocab_size}. Materialize `tokenized_shards` "
                    "again."
                )


def memory_of(spec: TrainingSpec, model: TrainableModel) -> Reckoning:
    """The reckoning of a run's memory."""
    from transformers import AutoConfig

    return partial(
        training_memory,
        AutoConfig.from_pretrained(spec.base_model_folder),
        spec.training,
        model.parameter_count,
        model.trained_count,
    )


def _recomputes(spec: TrainingSpec, model: TrainableModel, workers: Workers) -> bool:
    """Whether activations are computed twice; raises UserError where that does not fit either."""
    placement, network = spec.training.placement, model.network
    setting, memory = placement.activation_checkpointing, device_of(workers.device).memory()
    can = isinstance(network, Decoder) or network.inner.supports_gradient_checkpointing
    if memory is None:
        return bool(setting)
    keeps = not (can if setting is None else setting)
    reckon, row_tokens = memory_of(spec, model), spec.shards.sequence_length
    check_memory(reckon, placement, row_tokens, workers.count, memory, keeps)
    sizes = reckon(placement.device_batch_size * row_tokens, workers.count, True)
    return not keeps and (setting or sum(sizes.values()) > USABLE * memory)


def build_strategy(
    spec: TrainingSpec, objective: Objective, workers: Workers, precision: Precision
) -> Strategy:
    """Make the model that a spec describes and spread it over the workers; raises UserError where
    weights, config, vocabulary or adapters do not fit together."""
    training, placement = spec.training, spec.training.placement
    if placement.strategy:
        build = resolve_name(placement.strategy.builds)
        return build(spec, workers, precision, lambda: _build_model(spec, objective, workers))
    model = _build_model(spec, objective, workers)
    clip = training.optimizer.gradient_clip

    def spread(model: TrainableModel) -> Optimizers:
        # In this order: each worker reads its own part of the divided weights, and the optimizers
        # take these.
        shard(model, workers, placement.replicas, precision)
        model.read_weights(workers.device)
        return build_optimizers(model, training.optimizer)

    if placement.pipeline_parallel > 1:
        # To import torch's schedules takes 0.4 s, which other trainings need not wait for.
        from recipes.distributed.pipeline import PipelineParallel, StageModel

        stage = StageModel(model, decoder_of(model, "pipeline_parallel"), workers, precision)
        shape = placement.device_batch_size, spec.shards.sequence_length
        passes = training.budget.global_batch_size // workers.dp_size // shape[0]
        return PipelineParallel(stage, spread(stage), clip, precision, workers, shape, passes)
    return FullySharded(model, spread(model), clip, precision, workers.device)


def _build_model(spec: TrainingSpec, objective: Objective, workers: Workers) -> TrainableModel:
    training = spec.training
    model = objective.load(spec)
    device = device_of(workers.device)
    # Weights that are still to be read have no memory to move; they go to the device when they are
    # read.
    if model.unread is None:
        model.to(device.tries_on)
    if objective.check:
        objective.check(model, spec)
    if training.adapters:
        add_adapters(model, training.adapters, training.seed)
        model.to(device.tries_on)
    if training.precision == "float8":
        multiply_in_float8(model, workers.device)
    placement = training.placement
    if _recomputes(spec, model, workers):
        model.enable_activation_checkpointing()
    # Another strategy's hooks on every layer would break what is compiled into pieces.
    compiles = device.compiles and placement.strategy is None
    if chosen(placement.compile, compiles):
        is_packed = training.longest_input(spec.shards.sequence_length) is not None
        compile_layers(model, is_packed and model.network.reads_packed_rows)
    return model


def compile_layers(model: TrainableModel, is_packed: bool, **options: Any) -> None:
    """Compile each layer as one graph, of one shape where all batches are packed rows. Other
    batches are as wide as their longest example, and would be compiled again for every width."""
    for layer in model.network.layers:
        layer.compile(dynamic=not is_packed, **options)
