"""Before the first step: faults of the inputs, and the model ready to train, with its strategy."""

import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name

from artifacts.errors import DamagedArtifact, UserError
from artifacts.shards.shard_set import ShardSet
from recipes.device import device_of
from recipes.distributed.sharding import shard
from recipes.distributed.strategy import FullySharded, Strategy
from recipes.distributed.workers import Workers
from recipes.model.base_model import check_row_length
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder.loss import TOKENS_IN_FLIGHT
from recipes.model.decoder.network import Decoder
from recipes.model.lora import add_adapters
from recipes.objective import Objective
from recipes.optimization import build_optimizers
from recipes.settings import Precision, chosen
from recipes.spec import TrainingSpec


def check_inputs(spec: TrainingSpec, workers: Workers) -> None:
    """Compare processes, shards, base model and settings; raises UserError on what does not fit."""
    planned = spec.training.placement.world_size
    if workers.count != planned:
        raise UserError(
            f"The run was planned for {planned} training process(es), but {workers.count} were "
            f"started. Start {planned}, or set `checkpoint.placement.workers` to {workers.count}."
        )
    base_model = Path(spec.base_model_folder)
    for name in ("config.json", "tokenizer.json"):
        if not (base_model / name).exists():
            raise UserError(
                f"The base model folder {base_model} has no {name}. Materialize `base_model` again."
            )
    found = hashlib.sha256((base_model / "tokenizer.json").read_bytes()).hexdigest()
    if found != spec.shards.tokenizer_sha256:
        raise UserError(
            f"The shards in {spec.shards_folder} were tokenized with another tokenizer (SHA-256 "
            f"{spec.shards.tokenizer_sha256[:12]}…) than {base_model}/tokenizer.json "
            f"({found[:12]}…). Materialize `tokenized_shards` again."
        )
    config = json.loads((base_model / "config.json").read_text())
    if spec.shards.form != spec.training.form:
        raise UserError(
            f"The shards in {spec.shards_folder} hold {spec.shards.form}, but the recipe "
            f"{spec.training.recipe} learns from {spec.training.form}. Materialize "
            "`raw_corpus` and what follows with the sources' `examples` set."
        )
    if longest := spec.training.longest_input(spec.shards.sequence_length):
        check_row_length(longest, config)
    _check_division(spec, workers)


def _check_division(spec: TrainingSpec, workers: Workers) -> None:
    replicas = spec.training.placement.replicas
    degree = spec.training.placement.tensor_parallel
    if workers.count % (replicas * degree):
        raise UserError(
            f"`checkpoint.placement.replicas` ({replicas}) times "
            f"`checkpoint.placement.tensor_parallel` ({degree}) does not divide the "
            f"{workers.count} workers."
        )
    batch = spec.training.budget.global_batch_size
    shares = workers.count * workers.chips // degree
    if batch % shares:
        kind, other = "chips", "another machine"
        if workers.chips == 1:
            kind, other = "workers", "another `checkpoint.placement.workers`"
        raise UserError(
            f"`checkpoint.budget.global_batch_size` is {batch} rows, which {shares} {kind} cannot "
            f"share evenly. Choose a multiple of {shares}, or {other}."
        )


def check_tokens(shard_sets: Iterable[ShardSet], folder: str, workers: Workers) -> None:
    """Look for tokens outside the vocabulary, each worker in its part of the shards.

    One pass at the speed of the disk, since a bad token would otherwise end a run in its middle.
    Shards in an object store are checked row by row when they are read.

    Raises:
        DamagedArtifact: naming the shard.
    """
    if "://" in folder:
        return
    for shards in shard_sets:
        named = zip(shards.entries, shards.shards, strict=True)
        for entry, opened in itertools.islice(named, workers.rank, None, workers.count):
            largest = int(opened.tokens.max())
            if largest >= shards.stats.vocab_size:
                raise DamagedArtifact(
                    f"The shard {entry.name} in {folder} holds token {largest}, outside the "
                    f"vocabulary of {shards.stats.vocab_size}. Materialize `tokenized_shards` "
                    "again."
                )


def check_vocabulary(spec: TrainingSpec, size: int) -> None:
    """Refuse shards whose token ids a model of so many embeddings has none for."""
    if spec.shards.vocab_size > size:
        raise UserError(
            f"The shards in {spec.shards_folder} have a vocabulary of {spec.shards.vocab_size}, "
            f"the base model only {size} embeddings. Tokenize with the base model's tokenizer."
        )


USABLE = 0.85
"""Of a GPU's memory; CUDA itself, buffers of messages and gaps between tensors take the rest."""
STATE_BYTES = 16
"""Of a trained parameter: weight, gradient and AdamW's two moments, all in float32."""
EAGER = 2
"""Times what a compiled decoder keeps that a model of transformers does."""


def keeps_activations(
    model: TrainableModel, tokens: int, processes: int, memory: float | None
) -> bool:
    """Whether a GPU holds all that the backward pass needs, so that nothing is computed twice.

    True also of a model that cannot compute it twice.

    Args:
        tokens: of one forward pass.
        processes: over which the model is divided.
        memory: bytes of one GPU; None where there is none.
    """
    network = model.network
    can_recompute = isinstance(network, Decoder) or network.inner.supports_gradient_checkpointing
    if memory is None or not can_recompute:
        return True
    every = model.parameter_count
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    # Matrices are multiplied in bfloat16, of which there is a copy.
    state = (STATE_BYTES * trained + 4 * (every - trained) + 2 * every) / processes
    vocabulary, hidden = network.head_weight.shape
    head = 4 * vocabulary * (min(tokens, TOKENS_IN_FLIGHT["cuda"]) + hidden)
    return state + head + activation_bytes(model, tokens) < USABLE * memory


def activation_bytes(model: TrainableModel, tokens: int) -> int:
    """What the layers keep of a forward pass in bfloat16 until the backward pass.

    Of each token and layer in float32 the residual stream, twice; in bfloat16 what both norms, the
    queries and the attention give, keys and values, and three times the inner feed-forward.
    """
    if isinstance(model.network, Decoder):
        shape = model.network.shape
        inner, keys, times = shape.intermediate_size, shape.key_value_heads * shape.head_dim, 1
        layers, hidden = shape.layers, shape.hidden_size
    else:
        config = model.network.inner.config.get_text_config()
        layers, hidden = config.num_hidden_layers, config.hidden_size
        inner, keys, times = getattr(config, "intermediate_size", 4 * hidden), hidden, EAGER
    return tokens * layers * times * (16 * hidden + 4 * keys + 6 * inner)


def build_strategy(
    spec: TrainingSpec, objective: Objective, workers: Workers, precision: Precision
) -> Strategy:
    """Make the model that a spec describes and spread it over the workers.

    Raises:
        UserError: weights, config, vocabulary or adapters do not fit together.
    """
    training, placement = spec.training, spec.training.placement
    if placement.strategy:
        build = resolve_name(placement.strategy.builds)
        built: Strategy = build(
            spec, workers, precision, lambda: _build_model(spec, objective, workers)
        )
        return built
    model = _build_model(spec, objective, workers)
    shard(model, workers, placement.replicas, precision)
    model.read_weights(workers.device)
    optimizers = build_optimizers(model, training.optimizer)
    clip = training.optimizer.gradient_clip
    return FullySharded(model, optimizers, clip, precision, workers.device)


def _build_model(spec: TrainingSpec, objective: Objective, workers: Workers) -> TrainableModel:
    training = spec.training
    model = objective.load(spec)
    check_vocabulary(spec, model.network.head_weight.shape[0])
    device = device_of(workers.device)
    if model.unread is None:
        model.to(device.tries_on)
    if objective.check:
        objective.check(model, spec)
    if training.adapters:
        add_adapters(model, training.adapters, training.seed)
        model.to(device.tries_on)
    placement = training.placement
    recomputes = placement.activation_checkpointing
    if recomputes is None:
        tokens = placement.device_batch_size * spec.shards.sequence_length
        divided = workers.count // placement.replicas
        recomputes = not keeps_activations(model, tokens, divided, device.memory())
    if recomputes:
        model.enable_activation_checkpointing()
    # Another strategy's hooks on every layer would break what is compiled into pieces.
    compiles = device.compiles and placement.strategy is None
    if chosen(placement.compile, compiles):
        for layer in model.network.layers:
            layer.compile(dynamic=False)
    return model
