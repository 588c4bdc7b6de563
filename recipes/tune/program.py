"""torchtune's recipe, driven by the batches that it asks for.

A recipe's loop takes one batch after another, steps its optimizer when it has had enough of them,
and asks for the next. So whoever gives the batches holds control between any two steps, with
weights, optimizer and schedule as the step has left them: there the run is validated and saved.
"""

import importlib.util
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor

from artifacts.errors import UserError, first_line
from recipes.distributed.workers import Workers
from recipes.model.lora import DOWN
from recipes.settings.torchtune_config import Program, program_path
from recipes.tune.network import component

PARTS = "recipes.tune.program"
Inputs = dict[str, Any] | tuple[torch.Tensor, torch.Tensor]
"""A batch as a recipe takes it: by name, or for DPO the tokens and labels of both answers."""

WITH_SAMPLER: tuple[Program, ...] = (
    "lora_dpo_single_device",
    "lora_dpo_distributed",
    "full_dpo_distributed",
    "knowledge_distillation_distributed",
)
"""Recipes that take their sampler beside their batches."""

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


def open_recipe(program: Program, config: Any, batches: Batches, workers: Workers) -> Any:
    """A recipe of torchtune, set up to train on some batches.

    Args:
        config: of `runnable`.

    Raises:
        UserError: torchtune refuses the configuration.
    """
    module = _load(program, workers)
    from torchtune.recipe_interfaces import FTRecipeInterface

    (kind,) = (
        found
        for found in vars(module).values()
        if isinstance(found, type)
        and FTRecipeInterface in found.__mro__
        and found.__module__ == module.__name__
    )
    data = (batches, batches) if program in WITH_SAMPLER else batches
    with _refusing():
        recipe = kind(config)
        recipe._setup_data = lambda *args, **kwargs: data
        recipe.setup(config)
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
    teacher: Path | None = None,
) -> Any:
    """The configuration of a torchtune recipe with the graph's parts in their places.

    Raises:
        UserError: a component does not compute what its folder's model does.
    """
    from omegaconf import OmegaConf

    model, model_type = component(config["model"], base_model)
    weights = _weights(base_model, model_type, run_folder)
    made = config | {
        "model": model,
        "output_dir": str(run_folder),
        "device": device.type,
        "seed": seed,
        "shuffle": True,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "resume_from_checkpoint": False,
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
        "dataset": {},
        "tokenizer": {"_component_": f"{PARTS}.NoTokenizer"},
        "metric_logger": {"_component_": f"{PARTS}.StepLog"},
        "checkpointer": weights,
        # What a preference is measured against is the model as it was.
        "ref_checkpointer": weights,
    }
    if teacher:
        made |= _teacher_parts(config, teacher, model["vocab_size"], run_folder)
    if made.get("clip_grad_norm") is None:
        # Clips nothing, and has the norm logged.
        made["clip_grad_norm"] = "inf"
    if made.get("enable_activation_offloading") and device.type != "cuda":
        report("`enable_activation_offloading` is left off: there is no GPU to offload from")
        made["enable_activation_offloading"] = False
    return OmegaConf.create(made)


def _teacher_parts(
    config: dict[str, Any], teacher: Path, vocab_size: int, run_folder: Path
) -> dict[str, Any]:
    """The model that is learnt from, which has to have the tokens of the one that learns."""
    model, model_type = component(config["teacher_model"], teacher, "teacher_model")
    if model["vocab_size"] != vocab_size:
        raise UserError(
            f"`checkpoint.teacher`: the model in {teacher} has a vocabulary of "
            f"{model['vocab_size']} and the base model one of {vocab_size}, but a model learns "
            "from the probabilities of its own tokens. Choose a teacher with the base model's "
            "tokenizer."
        )
    return {
        "teacher_model": model,
        "teacher_checkpointer": _weights(teacher, model_type, run_folder),
    }


def _weights(folder: Path, model_type: str, run_folder: Path) -> dict[str, Any]:
    """What reads the weights of a Hugging Face folder."""
    return {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": str(folder),
        "checkpoint_files": sorted(path.name for path in folder.glob("*.safetensors")),
        "output_dir": str(run_folder / "torchtune"),
        "model_type": model_type,
    }


def _load(program: Program, workers: Workers) -> ModuleType:
    """The module of a recipe's file, for this run alone; the folder it lies in is no package."""
    spec = importlib.util.spec_from_file_location(f"torchtune_{program}", program_path(program))
    assert spec and spec.loader, "a file's place gives a loader"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = vars(module)
    names["log"].setLevel(logging.WARNING)
    if program.endswith("_distributed"):
        _meet(workers)
        # The workers have met already.
        names["init_process_group"] = lambda *args, **kwargs: None
    if workers.device.type == "cpu":
        names["training"] = SimpleNamespace(**vars(names["training"]) | OF_A_GPU)
    return module


def _meet(workers: Workers) -> None:
    """A group of one, where a recipe for many has one worker; it listens nowhere."""
    if workers.count == 1 and not dist.is_initialized():
        backend = "nccl" if workers.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


@contextmanager
def _refusing() -> Iterator[None]:
    from torchtune.config._errors import InstantiationError

    try:
        yield
    except (AssertionError, InstantiationError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"torchtune refuses `checkpoint.config`: {first_line(error)}") from error
