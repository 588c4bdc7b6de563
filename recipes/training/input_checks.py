"""Faults of the inputs, found before the first step."""

import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

from artifacts.errors import DamagedArtifact, UserError
from artifacts.shards.shard_set import ShardSet
from recipes.distributed.workers import Workers
from recipes.model.row_length import check_row_length
from recipes.spec import TrainingSpec


def check_inputs(spec: TrainingSpec, workers: Workers) -> None:
    """Compare shards, base model and settings; raises UserError naming what does not fit."""
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
    form = spec.shards.form
    if form != spec.training.form:
        raise UserError(
            f"The shards in {spec.shards_folder} hold {form}, but the recipe "
            f"{spec.training.recipe} learns from {spec.training.form}. Materialize "
            "`raw_corpus` and what follows with the sources' `examples` set."
        )
    if form in ("pretraining", "conversations"):
        check_row_length(spec.shards.sequence_length, config)
    elif form == "preferences":
        # A row holds two conversations, which the model is given one by one.
        check_row_length(spec.shards.sequence_length // 2, config)
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
        for entry, shard in itertools.islice(named, workers.rank, None, workers.count):
            largest = int(shard.tokens.max())
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
