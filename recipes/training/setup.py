"""Before the first step: faults of the inputs, and the model ready to train, with its strategy."""

import hashlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from artifacts.errors import DamagedArtifact, UserError
from artifacts.shards.shard_set import ShardSet
from recipes.device import device_of
from recipes.distributed.sharding import decoder_of, shard
from recipes.distributed.strategy import FullySharded, Strategy
from recipes.distributed.workers import Workers
from recipes.model.base_model import check_family, check_row_length
from recipes.model.causal_model import TrainableModel
from recipes.model.lora import add_adapters
from recipes.objective import Objective
from recipes.optimization import Optimizers, build_optimizers
from recipes.sections import chosen
from recipes.settings import Precision
from recipes.spec import TrainingSpec
from recipes.training.memory import recomputes


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
        # An adapter's matrices are made on the processor, wherever the one that it adapts is.
        model.to(device.tries_on)
    if training.precision == "float8":
        multiply_in_float8(model, workers.device)
    placement = training.placement
    if recomputes(spec, model, workers):
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
