"""The model of a run, ready to train: weights, adapters, recomputation, compiling, sharding."""

from pathlib import Path

from recipes.input_checks import check_vocabulary
from recipes.lora import add_adapters
from recipes.model import TrainableModel, create_model, load_model
from recipes.parallel import Workers
from recipes.precision import Precision
from recipes.settings import chosen
from recipes.sharding import shard
from recipes.spec import TrainingSpec


def build_model(spec: TrainingSpec, workers: Workers, precision: Precision) -> TrainableModel:
    """Make the model that a spec describes, on this worker's device.

    Raises:
        UserError: weights, config, vocabulary or adapters do not fit together.
    """
    training, folder = spec.training, Path(spec.base_model_folder)
    if training.initialise == "random":
        model = create_model(folder, training.seed)
    else:
        model = load_model(folder)
    check_vocabulary(spec, model)
    if training.lora:
        add_adapters(model, training.lora, training.seed)
    model.to(workers.device)
    if training.recompute_activations:
        model.recompute_activations()
    if chosen(training.compile, workers.device.type == "cuda"):
        for layer in model.network.layers:
            layer.compile(dynamic=False)
    shard(model, workers, training.replicas, precision)
    return model
