"""Before the first step: faults of the inputs, and the model ready to train, with its strategy."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from artifacts.errors import DamagedArtifact, UserError
from artifacts.shards.shard_set import ShardSet
from recipes.device import device_of
from recipes.distributed.sharding import shard
from recipes.distributed.strategy import FullySharded, Strategy
from recipes.distributed.workers import Workers
from recipes.model.base_model import check_row_length
from recipes.model.causal_model import TrainableModel
from recipes.model.decoder.network import Decoder
from recipes.model.float8 import multiply_in_float8
from recipes.model.lora import add_adapters
from recipes.model.memory import USABLE, TrainingMemory, check_memory, training_memory
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


def memory_of(spec: TrainingSpec, model: TrainableModel) -> Callable[[int, int], TrainingMemory]:
    """The reckoning of a run's memory by the tokens of a pass and the number of workers."""
    from transformers import AutoConfig

    return partial(
        training_memory,
        AutoConfig.from_pretrained(spec.base_model_folder),
        spec.training,
        model.parameter_count,
        sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


def _recomputes(spec: TrainingSpec, model: TrainableModel, workers: Workers) -> bool:
    """Whether activations are computed twice; raises UserError where that does not fit either."""
    placement, network = spec.training.placement, model.network
    wanted, memory = placement.activation_checkpointing, device_of(workers.device).memory()
    can = isinstance(network, Decoder) or network.inner.supports_gradient_checkpointing
    if memory is None or not can:
        return bool(wanted)
    reckon, row_tokens = memory_of(spec, model), spec.shards.sequence_length
    if placement.strategy is None:
        check_memory(reckon, placement, row_tokens, workers.count, memory)
    needed = reckon(placement.device_batch_size * row_tokens, workers.count)
    return needed.total(keeps=True) > USABLE * memory if wanted is None else wanted


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
    if training.precision == "float8":
        multiply_in_float8(model, workers.device)
    placement = training.placement
    if _recomputes(spec, model, workers):
        model.enable_activation_checkpointing()
    # Another strategy's hooks on every layer would break what is compiled into pieces.
    compiles = device.compiles and placement.strategy is None
    if chosen(placement.compile, compiles):
        is_packed = training.longest_input(spec.shards.sequence_length) is not None
        compile_layers(model, is_packed and getattr(model.network, "reads_packed_rows", True))
    return model


def compile_layers(model: TrainableModel, is_packed: bool, **options: Any) -> None:
    """Have each layer be one graph.

    Args:
        is_packed: all batches are of one shape; others are as wide as their longest example, and
            would be compiled again for every width.
    """
    for layer in model.network.layers:
        layer.compile(dynamic=not is_packed, **options)
