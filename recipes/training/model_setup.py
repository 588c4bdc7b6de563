"""The model of a run, ready to train: weights, adapters, recomputation, compiling, sharding."""

from pathlib import Path

from recipes.distributed.sharding import shard
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel, create_model, load_model
from recipes.model.lora import add_adapters
from recipes.model.probe import check_trainable
from recipes.model.transformers_network import TransformersNetwork
from recipes.sections import Precision, chosen
from recipes.spec import TrainingSpec
from recipes.training.input_checks import check_vocabulary


def build_model(spec: TrainingSpec, workers: Workers, precision: Precision) -> TrainableModel:
    """Make the model that a spec describes, on this worker's device.

    Raises:
        UserError: weights, config, vocabulary or adapters do not fit together.
    """
    training, folder = spec.training, Path(spec.base_model_folder)
    if training.starts_from == "random":
        model = create_model(folder, training.seed)
    else:
        model = load_model(folder)
    check_vocabulary(spec, model)
    model.to(workers.device)
    if isinstance(model.network, TransformersNetwork):
        check_trainable(model.network, spec.shards.sequence_length)
    if training.adapters:
        add_adapters(model, training.adapters, training.seed)
        model.to(workers.device)
    placement = training.placement
    if placement.activation_checkpointing:
        model.enable_activation_checkpointing()
    if chosen(placement.compile, workers.device.type == "cuda"):
        for layer in model.network.layers:
            layer.compile(dynamic=False)
    shard(model, workers, placement.replicas, precision)
    return model
