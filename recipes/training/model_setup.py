"""The model of a run, ready to train: weights, adapters, recomputation, compiling, its strategy."""

from pathlib import Path

from artifacts.errors import UserError
from recipes.device import device_of
from recipes.distributed.fully_sharded import FullySharded
from recipes.distributed.sharding import shard
from recipes.distributed.strategy import Strategy
from recipes.distributed.workers import Workers
from recipes.model.causal_model import TrainableModel
from recipes.model.lora import add_adapters
from recipes.objectives.objective import Objective
from recipes.optimization.optimizer import build_optimizers
from recipes.settings.deepspeed import DeepSpeedSettings
from recipes.settings.deepspeed_configuration import configuration, contradictions
from recipes.settings.sections import Precision, chosen
from recipes.spec import TrainingSpec
from recipes.training.input_checks import check_vocabulary


def build_strategy(
    spec: TrainingSpec, objective: Objective, workers: Workers, precision: Precision
) -> Strategy:
    """Make the model that a spec describes and spread it over the workers.

    Raises:
        UserError: weights, config, vocabulary or adapters do not fit together.
    """
    training, placement = spec.training, spec.training.placement
    if placement.deepspeed:
        return _build_zero(spec, objective, workers, placement.deepspeed, precision)
    model = _build_model(spec, objective, workers)
    if placement.device == "tpu":
        from recipes.xla.strategy import Xla

        longest = spec.shards.sequence_length
        return Xla(model, training.optimizer, precision, workers, longest)
    shard(model, workers, placement.replicas, precision)
    optimizers = build_optimizers(model, training.optimizer)
    clip = training.optimizer.gradient_clip
    return FullySharded(model, optimizers, clip, precision, workers.device)


def _build_zero(
    spec: TrainingSpec,
    objective: Objective,
    workers: Workers,
    settings: DeepSpeedSettings,
    precision: Precision,
) -> Strategy:
    from recipes.zero.engine import check_configuration
    from recipes.zero.strategy import Zero

    training = spec.training
    found = contradictions(precision, training.budget, training.optimizer, training.placement)
    if found:
        raise UserError("; ".join(f"`checkpoint.{fault}`" for fault in found))
    told = configuration(
        precision == "bfloat16",
        training.budget.global_batch_size,
        workers.count,
        training.placement.device_batch_size,
        training.optimizer.gradient_clip,
        settings,
    )
    check_configuration(told)
    model = _build_model(spec, objective, workers)
    scratch = Path(spec.run_folder) / f".zero-{workers.rank - workers.local_rank}"
    return Zero(model, training.optimizer, told, workers, scratch)


def _build_model(spec: TrainingSpec, objective: Objective, workers: Workers) -> TrainableModel:
    training = spec.training
    model = objective.load(spec)
    check_vocabulary(spec, model.network.head_weight.shape[0])
    device = device_of(workers.device)
    model.to(device.tries_on)
    objective.check(model, spec)
    if training.adapters:
        add_adapters(model, training.adapters, training.seed)
        model.to(device.tries_on)
    placement = training.placement
    if placement.activation_checkpointing:
        model.enable_activation_checkpointing()
    # DeepSpeed's hooks on every layer would break what is compiled into pieces.
    compiles = device.compiles and placement.deepspeed is None
    if chosen(placement.compile, compiles):
        for layer in model.network.layers:
            layer.compile(dynamic=False)
    return model
