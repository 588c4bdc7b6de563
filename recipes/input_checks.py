"""Faults of the inputs, found before the first step."""

import hashlib
import json
from pathlib import Path
from typing import Any

from artifacts.errors import UserError
from recipes.model import TrainableModel
from recipes.parallel import Workers
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
    _check_length(spec, json.loads((base_model / "config.json").read_text()))
    _check_division(spec, workers)


def _check_length(spec: TrainingSpec, config: dict[str, Any]) -> None:
    length = spec.shards.sequence_length
    positions = config.get("max_position_embeddings")
    if positions and length > positions:
        raise UserError(
            f"Rows of {length} tokens are longer than the {positions} positions of the base model. "
            "Set a smaller `tokenized_shards.sequence_length`."
        )
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and length > window:
        raise UserError(
            f"Rows of {length} tokens are longer than the base model's sliding window of {window}, "
            "which training does not apply. Set `tokenized_shards.sequence_length` to at most "
            f"{window}."
        )


def _check_division(spec: TrainingSpec, workers: Workers) -> None:
    degree = spec.training.tensor_parallel
    if workers.count % (spec.training.replicas * degree):
        raise UserError(
            f"`checkpoint.replicas` ({spec.training.replicas}) times `checkpoint.tensor_parallel` "
            f"({degree}) does not divide the {workers.count} workers."
        )
    batch = spec.training.global_batch_size
    shares = workers.count // degree
    if batch % shares:
        raise UserError(
            f"`checkpoint.global_batch_size` is {batch} rows, which {shares} workers cannot "
            f"share evenly. Choose a multiple of {shares}, or another `workers`."
        )


def check_vocabulary(spec: TrainingSpec, model: TrainableModel) -> None:
    """Refuse shards whose token ids the model has no embedding for."""
    size = model.network.head_weight.shape[0]
    if spec.shards.vocab_size > size:
        raise UserError(
            f"The shards in {spec.shards_folder} have a vocabulary of {spec.shards.vocab_size}, "
            f"the base model only {size} embeddings. Tokenize with the base model's tokenizer."
        )
