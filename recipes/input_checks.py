"""Faults of the inputs, found before the first step."""

import hashlib
import json
from pathlib import Path

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
    positions = json.loads((base_model / "config.json").read_text()).get("max_position_embeddings")
    if positions and spec.shards.sequence_length > positions:
        raise UserError(
            f"Rows of {spec.shards.sequence_length} tokens are longer than the {positions} "
            "positions of the base model. Set a smaller `tokenized_shards.sequence_length`."
        )
    if workers.count % spec.training.replicas:
        raise UserError(
            f"`checkpoint.replicas` is {spec.training.replicas}, which does not divide the "
            f"{workers.count} workers."
        )
    if spec.training.optimizer == "muon" and workers.count > 1:
        raise UserError(
            "`checkpoint.optimizer: muon` needs whole matrices, so it runs on one worker only. Use "
            "adamw, or set `checkpoint.workers` to 1."
        )
    batch = spec.training.global_batch_size
    if batch % workers.count:
        raise UserError(
            f"`checkpoint.global_batch_size` is {batch} rows, which {workers.count} workers cannot "
            f"share evenly. Choose a multiple of {workers.count}, or another `workers`."
        )


def check_vocabulary(spec: TrainingSpec, model: TrainableModel) -> None:
    """Refuse shards whose token ids the model has no embedding for."""
    size = model.network.head_weight.shape[0]
    if spec.shards.vocab_size > size:
        raise UserError(
            f"The shards in {spec.shards_folder} have a vocabulary of {spec.shards.vocab_size}, "
            f"the base model only {size} embeddings. Tokenize with the base model's tokenizer."
        )
