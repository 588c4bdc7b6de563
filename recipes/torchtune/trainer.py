"""A training run whose steps are torchtune's own, driven by the batches that it asks for.

A recipe's loop takes one batch after another, steps its optimizer when it has had enough of them,
and asks for the next. So whoever gives the batches holds control between any two steps, with
weights, optimizer and schedule as the step has left them: there the run is validated and saved.
"""

import importlib.util
import json
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from artifacts.errors import UserError, first_line
from artifacts.reasons import reason_of
from recipes.data.batch import IGNORED, Batch
from recipes.distributed.strategy import FullySharded, StepOutcome, Strategy, count_positions
from recipes.distributed.workers import Workers, form_group_of_one
from recipes.model.causal_model import TrainableModel, summed_loss
from recipes.model.lora import DOWN
from recipes.torchtune.objective import PreferenceBatch
from recipes.torchtune.settings import (
    MODEL_TYPES,
    Program,
    TorchtuneSettings,
    is_preference,
    model_package,
    program_path,
)
from recipes.training.trainer import Trainer

SCALED_ROPE = {
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}
"""What is fixed in the code of torchtune's Llama."""


def component(model: dict[str, Any], folder: Path) -> tuple[dict[str, Any], str]:
    """The builder and arguments of a folder's model as torchtune builds it, and its model type.

    Its sizes are those of the folder's `config.json`; from the configuration's section come the
    adapters. Raises UserError where torchtune cannot compute what transformers computes.
    """
    config = json.loads((folder / "config.json").read_text())
    expected, actual = MODEL_TYPES[model_package(model)], config["model_type"]
    if expected != actual:
        raise UserError(
            f"`checkpoint.config`: `model._component_` is {model['_component_']}, but the model in "
            f"{folder} is of the type {actual}. Name the component of that model."
        )
    arguments = {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config.get("num_key_value_heads") or config["num_attention_heads"],
        "embed_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
    }
    head_dim = config.get("head_dim") or arguments["embed_dim"] // arguments["num_heads"]
    # torchtune cannot be told the size of a head: it divides the width by the number of heads.
    if head_dim * arguments["num_heads"] != arguments["embed_dim"]:
        raise _unlike(folder, "head_dim", head_dim)
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise _unlike(folder, key, True)
    builder, of_family, model_type = _family(config, folder)
    adapters = {key: value for key, value in model.items() if key != "_component_"}
    name = str(model["_component_"]).rpartition(".")[2]
    # torchtune's builders of this name set it; here the general builder is named in their place.
    if name.startswith("qlora"):
        adapters.setdefault("quantize_base", True)
    is_adapted = "lora" in name
    package, _, plain = builder.rpartition(".")
    built = f"{package}.lora_{plain}" if is_adapted else builder
    return {"_component_": built} | arguments | of_family | adapters, model_type


def _family(config: dict[str, Any], folder: Path) -> tuple[str, dict[str, Any], str]:
    """Builder, its own arguments and the name by which torchtune converts the weights."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    base = {"rope_base": rope.get("rope_theta") or config.get("rope_theta", 10_000.0)}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    tied = bool(config.get("tie_word_embeddings"))
    if config["model_type"] == "llama":
        if kind == "llama3":
            for key, value in SCALED_ROPE.items():
                if rope.get(key) != value:
                    raise _unlike(folder, key, rope.get(key))
        elif kind != "default":
            raise _unlike(folder, "rope_type", kind)
        # torchtune's Llama always scales its positions; by a factor of 1 they stay as they are.
        base |= {"scale_factor": rope["factor"] if kind == "llama3" else 1}
        # torchtune's Llama 3.2 ties embeddings and output matrix, its 3.1 keeps them apart.
        name = "llama3_2" if tied else "llama3_1"
        return f"torchtune.models.{name}.{name}", base, "LLAMA3_2" if tied else "LLAMA3"
    if kind != "default":
        raise _unlike(folder, "rope_type", kind)
    if config["model_type"] == "qwen2":
        return "torchtune.models.qwen2.qwen2", base | {"tie_word_embeddings": tied}, "QWEN2"
    if tied:
        raise _unlike(folder, "tie_word_embeddings", True)
    return "torchtune.models.mistral.mistral", base, "MISTRAL"


def _unlike(folder: Path, key: str, value: Any) -> UserError:
    return UserError(
        f"{folder}/config.json says `{key}: {value}`, which torchtune's model of this family does "
        "not compute. Use the recipe continued_pretraining or fine_tuning."
    )


class TuneModel(TrainableModel):
    """A torchtune model as the trainer sees it: its forward is the loss."""

    def __init__(self, network: nn.Module, base_model: Path, arguments: dict[str, Any]) -> None:
        super().__init__(network)
        self._config = json.loads((base_model / "config.json").read_text())
        self._arguments = arguments

    @property
    def is_exported_by_name(self) -> bool:
        # Adapters are merged with the matrices that they belong to, so both have to be at hand.
        return False

    @property
    def attention_width(self) -> int:
        """Layers times heads times head size."""
        return int(self._arguments["num_layers"] * self._arguments["embed_dim"])

    def forward(self, batch: Batch) -> torch.Tensor:
        """The loss in nats, summed over the batch's targets, in the precision of the weights."""
        inputs = model_inputs(batch)
        del inputs["labels"]
        with torch.autocast(batch.tokens.device.type, enabled=False):
            logits = self.network(**inputs)
        # A loss that is made in chunks has the model give its logits in chunks.
        all_logits = torch.cat(logits, dim=1) if isinstance(logits, list) else logits
        return summed_loss(all_logits, batch.targets)

    def to_hugging_face(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole weights by torchtune's names in the form of the family's checkpoints, adapters
        merged."""
        from torchtune.models import convert_weights
        from torchtune.models.qwen2._convert_weights import qwen2_tune_to_hf
        from torchtune.modules.peft import get_merged_lora_ckpt

        arguments = self._arguments
        if "lora_rank" in arguments:
            # It adds in place, and these may be the tensors that are trained.
            copies = {name: tensor.clone() for name, tensor in weights.items()}
            weights = get_merged_lora_ckpt(copies, arguments["lora_rank"], arguments["lora_alpha"])
        sizes = {
            "num_heads": arguments["num_heads"],
            "num_kv_heads": arguments["num_kv_heads"],
            "dim": arguments["embed_dim"],
        }
        if self._config["model_type"] == "qwen2":
            tied = arguments["tie_word_embeddings"]
            return qwen2_tune_to_hf(weights, tie_word_embeddings=tied, **sizes)
        return convert_weights.tune_to_hf(weights, **sizes)


def model_inputs(batch: Batch) -> dict[str, Any]:
    """A batch of packed rows as torchtune's recipes take it, whose documents do not see another.

    `labels` stand at the place of the token that they are, shape (rows, sequence_length): a recipe
    shifts them itself.
    """
    from torchtune.modules.attention_utils import packed_block_causal_mask

    labels = torch.full_like(batch.targets, IGNORED)
    labels[:, 1:] = batch.targets[:, :-1]
    return {
        "tokens": batch.tokens,
        "labels": labels,
        "input_pos": batch.positions.long(),
        # Each stretch of padding is a segment as well.
        "mask": packed_block_causal_mask(
            [torch.unique_consecutive(row, return_counts=True)[1] for row in batch.segments]
        ),
    }


class PreferenceModel(TuneModel):
    """A model as a recipe of DPO trains it: its forward is the recipe's loss."""

    def __init__(self, recipe: Any, base_model: Path, arguments: dict[str, Any]) -> None:
        super().__init__(recipe._model, base_model, arguments)
        self._recipe = recipe

    def forward(self, batch: PreferenceBatch) -> torch.Tensor:  # type: ignore[override]
        """The loss, summed over examples; ln 2 each, as long as nothing has been learnt."""
        from torchtune.modules.peft import disable_adapter

        recipe, inputs = self._recipe, (batch.tokens, batch.targets)
        # Without its adapters, a model with adapters is the reference model.
        reference = getattr(recipe, "_ref_model", None)
        with torch.autocast(batch.tokens.device.type, enabled=False):
            chosen, rejected, *_ = recipe.concatenated_forward(self.network, inputs)
            with torch.no_grad(), nullcontext() if reference else disable_adapter(self.network):
                before = recipe.concatenated_forward(reference or self.network, inputs)[:2]
            losses = recipe._loss_fn(chosen, rejected, *before)[0]
        return (losses * batch.is_example).sum()


PARTS = "recipes.torchtune.trainer"
Inputs = dict[str, Any] | tuple[torch.Tensor, torch.Tensor]
"""A batch as a recipe takes it: by name, or for DPO the tokens of both answers, and their labels at
their own places."""

OF_A_GPU: dict[str, Callable[..., Any]] = {
    "get_memory_stats": lambda *args, **kwargs: {},
    "log_memory_stats": lambda *args, **kwargs: None,
    "cleanup_before_training": lambda: None,
}
"""What the distributed recipes do with a GPU's memory without asking whether there is one."""


class Batches:
    """What a recipe takes for its data loader: all batches of the run, as one epoch."""

    def __init__(self, count: int, batches: Callable[[], Iterator[Inputs]]) -> None:
        self._count, self._batches = count, batches
        self.sampler = self

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Inputs]:
        return self._batches()

    def set_epoch(self, epoch: int) -> None:
        """The order is the graph's."""

    def state_dict(self) -> dict[str, Any]:
        """Where reading stands is in the graph's checkpoints."""
        return {}


class StepLog:
    """What a recipe takes for its metric logger: it keeps what was said of the last step."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def log_config(self, config: Any) -> None:
        """The configuration is in the checkpoint's settings."""

    def log_dict(self, payload: dict[str, Any], step: int) -> None:
        """Keep a step's figures."""
        self.last = {name: float(value) for name, value in payload.items()}

    def close(self) -> None:
        """Nothing is open."""


class NoTokenizer:
    """What a recipe takes for its tokenizer: rows come tokenized."""

    pad_id = 0


class LossOfTargets(nn.Module):
    """A recipe's loss, the mean over targets; without targets, zero with a gradient of zero.

    A batch has no targets where all its texts are forgotten.
    """

    def __init__(self, mean: nn.Module) -> None:
        super().__init__()
        self._mean, self.ignore_index = mean, IGNORED

    def forward(self, logits: torch.Tensor | list[torch.Tensor], labels: torch.Tensor) -> Any:
        """The loss in nats, without waiting for the device to say whether there are targets."""
        has_targets = (labels != IGNORED).any()
        # Without any, the first label becomes token 0: the mean is finite then, and is multiplied
        # by zero.
        labels = labels.clone()
        first = labels.view(-1)[:1]
        first.copy_(torch.where(has_targets, first, 0))
        return self._mean(logits, labels) * has_targets


def open_recipe(program: Program, config: Any, batches: Batches, workers: Workers) -> Any:
    """A recipe of torchtune, set up to train on some batches by a configuration of `runnable`;
    raises UserError where torchtune refuses it."""
    module = _load(program, workers)
    from torchtune.config._errors import InstantiationError
    from torchtune.recipe_interfaces import FTRecipeInterface

    (kind,) = (
        member
        for member in vars(module).values()
        if isinstance(member, type)
        and FTRecipeInterface in member.__mro__
        and member.__module__ == module.__name__
    )
    # DPO's recipes take a sampler beside the batches.
    data = (batches, batches) if is_preference(program) else batches
    try:
        recipe = kind(config)
        # Its own would open the configuration's dataset, and read it with the configuration's
        # tokenizer.
        recipe._setup_data = lambda *args, **kwargs: data
        recipe.setup(config)
    except (AssertionError, InstantiationError, RuntimeError, TypeError, ValueError) as error:
        # A GPU that is full or a worker that is gone is no fault of the configuration; a component
        # that is not there is, though what raised it looks like an absent package.
        if not isinstance(error, InstantiationError) and reason_of(error):
            raise
        raise UserError(f"torchtune refuses `checkpoint.config`: {first_line(error)}") from error
    if not is_preference(program):
        recipe._loss_fn = LossOfTargets(recipe._loss_fn)
    if program.endswith("_distributed"):
        _draw_adapters(recipe, config["seed"])
    # What a recipe writes after its epoch are checkpoints of its own form; the graph has its own.
    for saver in (recipe, getattr(recipe, "_checkpoint_client", recipe)):
        saver.save_checkpoint = lambda *args, **kwargs: None
    return recipe


def _draw_adapters(recipe: Any, seed: int) -> None:
    """Start the adapters with what one worker would draw: in torchtune each draws its own part."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in recipe._model.named_parameters():
        # The other half of an adapter begins at zero, and is drawn nowhere.
        if name.endswith(DOWN):
            drawn = torch.empty(weight.shape)
            # As torchtune and PEFT do.
            torch.nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            drawn = drawn.to(weight.device, weight.dtype)
            with torch.no_grad():
                weight.copy_(distribute_tensor(drawn, weight.device_mesh, weight.placements))


def runnable(
    config: dict[str, Any],
    base_model: Path,
    run_folder: Path,
    device: torch.device,
    seed: int,
    report: Callable[[str], None],
) -> Any:
    """The configuration of a torchtune recipe with the graph's parts in their places; raises
    UserError where a component does not compute what its folder's model does."""
    from omegaconf import OmegaConf

    model, model_type = component(config["model"], base_model)
    weights = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(base_model),
        "checkpoint_files": sorted(path.name for path in base_model.glob("*.safetensors")),
        "output_dir": str(run_folder / "torchtune"),
        "model_type": model_type,
    }
    full_config = config | {
        "model": model,
        "output_dir": str(run_folder),
        "device": device.type,
        "seed": seed,
        "shuffle": True,
        # To the recipe the run is one epoch, however often it passes over the rows (`Batches`).
        "epochs": 1,
        "max_steps_per_epoch": None,
        "resume_from_checkpoint": False,
        # `StepLog` is asked for the figures of every step.
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
        "dataset": {},
        "tokenizer": {"_component_": f"{PARTS}.NoTokenizer"},
        "metric_logger": {"_component_": f"{PARTS}.StepLog"},
        "checkpointer": weights,
        # What a preference is measured against is the model as it was.
        "ref_checkpointer": weights,
    }
    if full_config.get("clip_grad_norm") is None:
        # Clips nothing, but makes the recipe log the norm.
        full_config["clip_grad_norm"] = "inf"
    if full_config.get("enable_activation_offloading") and device.type != "cuda":
        report("`enable_activation_offloading` is left off: there is no GPU to offload from")
        full_config["enable_activation_offloading"] = False
    return OmegaConf.create(full_config)


def _load(program: Program, workers: Workers) -> ModuleType:
    """The module of a recipe's file, for this run alone; the folder it lies in is no package."""
    spec = importlib.util.spec_from_file_location(f"torchtune_{program}", program_path(program))
    assert spec and spec.loader, "a file's place gives a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = vars(module)
    names["log"].setLevel(logging.WARNING)
    if program.endswith("_distributed"):
        form_group_of_one(workers.device)
        # The workers have met already.
        names["init_process_group"] = lambda *args, **kwargs: None
    if workers.device.type == "cpu":
        names["training"] = SimpleNamespace(**vars(names["training"]) | OF_A_GPU)
    return module


class TuneTrainer(Trainer):
    """Takes torchtune's steps; all else, from the order of the data to the export, is the
    trainer's."""

    _gradient_norm = 0.0

    def _build(self) -> Strategy:
        settings, base_model = self._training, Path(self._spec.base_model_folder)
        assert isinstance(settings, TorchtuneSettings)
        config = runnable(
            settings.config,
            base_model,
            self._run_folder,
            self._workers.device,
            settings.seed,
            self._report,
        )
        batches = Batches(
            self._steps * settings.config["gradient_accumulation_steps"], self._batches
        )
        self._recipe = open_recipe(settings.run, config, batches, self._workers)
        self._first_rates = [group["lr"] for group in self._recipe._optimizer.param_groups]
        arguments = dict(config.model)
        model = TuneModel(self._recipe._model, base_model, arguments)
        if settings.is_preference:
            model = PreferenceModel(self._recipe, base_model, arguments)
            self._recipe._optimizer.register_step_pre_hook(self._measure_gradient)
        model.export_form_of(self._spec.shards, base_model)
        # Of a strategy it takes all but the steps.
        optimizers, clip = [self._recipe._optimizer], settings.optimizer.gradient_clip
        return FullySharded(model, optimizers, clip, self._precision, self._workers.device)

    def _measure_gradient(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Keep the norm of a step's gradient, which not every recipe logs."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm(
            gradient for gradient in gradients if gradient is not None
        )
        self._gradient_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def _train(self) -> None:
        self._recipe.global_step = self._step
        groups, schedule = self._recipe._optimizer.param_groups, self._recipe._lr_scheduler
        # The learning rates are brought to the step that the run goes on from by the schedule
        # itself: those in a checkpoint may be of an earlier step, and not every schedule can be
        # asked for the rate of a step.
        for group, rate in zip(groups, self._first_rates, strict=True):
            group["lr"] = rate
        for _ in range(self._step if schedule is not None else 0):
            schedule.step()
        if self._step < self._steps:
            self._recipe.train()

    def _batches(self) -> Iterator[Inputs]:
        """Every batch that is left; between two steps the run is validated and saved."""
        while self._step < self._steps and not self._state.diverged:
            with self._profile_of_next_step():
                began = time.perf_counter()
                step_input = self._begin_step()
                waited = time.perf_counter() - began
                self._checkpointer.wait_until_copied()
                # Dropout, where there is any, is another in every step and on every worker.
                # A hash of whole numbers is the same in every process.
                torch.manual_seed(hash((self._training.seed, self._step, self._workers.rank)))
                rate = self._recipe._optimizer.param_groups[0]["lr"]
                tokens, targets, pairs = count_positions(step_input.batches, self._workers)
                for batch in step_input.batches:
                    if isinstance(batch, PreferenceBatch):
                        yield batch.tokens, batch.targets
                        continue
                    assert isinstance(batch, Batch)
                    inputs = model_inputs(batch)
                    if not targets:
                        # A recipe divides by the number of labels, so there has to be one. It never
                        # learns the first, which nothing precedes.
                        inputs["labels"][0, 0] = 0
                    yield inputs
                seconds = time.perf_counter() - began - waited
                outcome = self._outcome(tokens, targets, pairs, seconds)
            self._record(outcome, rate, waited)
            self._end_step()

    def _outcome(self, tokens: int, targets: int, pairs: int, seconds: float) -> StepOutcome:
        assert isinstance(self._training, TorchtuneSettings)
        figures = {"loss": 0.0, "grad_norm": 0.0}
        if self._workers.is_rank_zero:
            figures = {"grad_norm": self._gradient_norm} | self._recipe._metric_logger.last
            if self._training.run == "lora_dpo_distributed":
                # This recipe logs the sum of all workers' means.
                figures["loss"] /= self._workers.count
        loss, norm = self._workers.sum(figures["loss"], figures["grad_norm"])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self._state.diverged = (
                f"Training stopped at step {self._step}: loss {loss}, gradient norm {norm}. Every "
                "checkpoint that was saved can be loaded. Lower `optimizer.lr` by "
                "`checkpoint.overrides`."
            )
        return StepOutcome(loss, norm, tokens, targets, pairs, seconds, skipped=False)
