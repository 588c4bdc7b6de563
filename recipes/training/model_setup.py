"""The model of a run, ready to train: weights, adapters, recomputation, compiling, sharding."""

from recipes.distributed.sharding import shard
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.model.lora import add_adapters
from recipes.objectives.objective import Objective
from recipes.sections import Precision, chosen
from recipes.spec import TrainingSpec
from recipes.training.input_checks import check_vocabulary


def build_model(
    spec: TrainingSpec, objective: Objective, workers: Workers, precision: Precision
) -> TrainableModel:
    """Make the model that a spec describes, on this worker's device.

    Raises:
        UserError: weights, config, vocabulary or adapters do not fit together.
    """
    training = spec.training
    model = objective.load(spec)
    check_vocabulary(spec, model.network.head_weight.shape[0])
    model.to(workers.device)
    objective.check(model, spec)
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
