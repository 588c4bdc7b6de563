"""The recipe that runs torchtune's own, from its YAML: resolved, refused where it cannot be.

Importing this loads neither torch nor torchtune, whose recipes lie in a folder that cannot be
imported: their files are found by the place of its distribution.
"""

import ast
import importlib.metadata
import re
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import Field, ValidationInfo, field_validator, model_validator

from artifacts.errors import first_line
from artifacts.examples import Form
from recipes.sections import BudgetSettings
from recipes.settings import PlacementSettings, WarmStartSettings

Program = Literal[
    "full_finetune_single_device",
    "full_finetune_distributed",
    "lora_finetune_single_device",
    "lora_finetune_distributed",
    "full_dpo_distributed",
    "lora_dpo_single_device",
    "lora_dpo_distributed",
]

OF_THE_GRAPH = frozenset(
    {
        "output_dir",
        "tokenizer",
        "dataset",
        "checkpointer",
        "ref_checkpointer",
        "metric_logger",
        "device",
        "seed",
        "shuffle",
        "epochs",
        "max_steps_per_epoch",
        "resume_from_checkpoint",
        "log_every_n_steps",
        "log_peak_memory_stats",
    }
)
"""Keys for what the graph does itself: they may be in the file, and are replaced."""
EXECUTION = OF_THE_GRAPH | {
    "batch_size",
    "gradient_accumulation_steps",
    "compile",
    "enable_activation_checkpointing",
    "enable_activation_offloading",
    "ac_mode",
    "ac_option",
    "custom_sharded_layers",
    "fsdp_cpu_offload",
    "fsdp_reshard_after_forward",
    "low_cpu_ram",
    "profiler",
}
"""Keys that do not decide the result of a training whose steps have the same rows."""
FIXED: dict[str, tuple[Any, str]] = {
    "shuffle": (True, "rows are always in the order of `checkpoint.seed`"),
    "resume_from_checkpoint": (False, "a run resumes from its own checkpoints by itself"),
    "enable_async_checkpointing": (False, "`checkpoint.checkpointing.in_background` does it"),
    "save_adapter_weights_only": (False, "the whole model is evaluated and served"),
    "optimizer_in_bwd": (False, "a step could not be saved as a whole; use gradient accumulation"),
    "tensor_parallel_dim": (1, "use the recipe `continued_pretraining`, which has it"),
    "tensor_parallel_plan": (None, "use the recipe `continued_pretraining`, which has it"),
    "collate_fn": (None, "rows are already packed"),
    "quantizer": (None, "only QLoRA quantizes during training"),
}
"""Keys with the one value that can be honored, and why."""
MODEL_TYPES = {
    "llama2": "llama",
    "code_llama2": "llama",
    "llama3": "llama",
    "llama3_1": "llama",
    "llama3_2": "llama",
    "llama3_3": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen2_5": "qwen2",
}
"""torchtune's package of a model to the `model_type` of its Hugging Face form."""
ADAPTER_KEYS = frozenset(
    {
        "lora_attn_modules",
        "apply_lora_to_mlp",
        "apply_lora_to_output",
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "use_dora",
        "quantize_base",
    }
)
"""What a configuration says of its model besides which one it is."""
COMPONENTS = ("model", "optimizer", "loss")
"""Keys whose value names the code that is run."""
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
DISTRIBUTION = "torchtune"


def program_path(program: str) -> Path:
    """The file of one of torchtune's recipes."""
    return _installed(f"recipes/{program}.py")


def read_config(program: Program, given: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """The configuration that a recipe is run with, every reference in it resolved: of a file, of
    one that torchtune ships, or of a mapping, with changes by dotted key as on the command line of
    `tune run`.

    Raises ValueError where it is absent or none of this recipe; the message names each key that
    cannot be honored.
    """
    # Here, since all settings load this module and few name a torchtune recipe.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = _load(given)
        for key, value in overrides.items():
            # As a line of YAML, in which 2e-5 is a number, and null is none.
            line = f"value: {value}" if isinstance(value, str) else yaml.safe_dump({"value": value})
            OmegaConf.update(config, key, OmegaConf.create(line).value)
        text = OmegaConf.to_yaml(config)
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"not a torchtune configuration: {first_line(error)}") from None
    assert isinstance(resolved, dict)
    values = {str(key): value for key, value in resolved.items()}
    # Keys that other values refer to, as `${key}`.
    referred_to = set(re.findall(r"\$\{(\w+)", text))
    _check(program, values, referred_to)
    # The resolved configuration has no references, so keys that only these read would be read by
    # nobody.
    keys, _ = _keys_read(program_path(program))
    return {key: values[key] for key in values if key not in referred_to - keys - FIXED.keys()}


def is_preference(program: Program) -> bool:
    """Whether a recipe learns which of two answers is the better one."""
    return "_dpo_" in program


def rows_per_step(config: dict[str, Any], workers: int) -> int:
    """Rows of one optimizer step, over all workers."""
    return int(config["batch_size"] * config["gradient_accumulation_steps"] * workers)


def _installed(path: str) -> Path:
    return Path(str(importlib.metadata.distribution(DISTRIBUTION).locate_file(path)))


def _load(source: Any) -> Any:
    from omegaconf import OmegaConf

    if isinstance(source, dict):
        # By the same reader as a file, to which 2e-5 is a number.
        return OmegaConf.create(yaml.safe_dump(source))
    path, shipped = Path(str(source)), _installed(f"recipes/configs/{source}.yaml")
    if not path.is_file() and not shipped.is_file():
        raise ValueError(
            f"there is no file {source}, and torchtune ships no configuration of that name; `tune "
            "ls` lists them"
        )
    config = OmegaConf.load(path if path.is_file() else shipped)
    if not OmegaConf.is_dict(config):
        raise ValueError(f"{path} is not a YAML mapping")
    return config


def _check(program: Program, config: dict[str, Any], referred_to: set[str]) -> None:
    keys, needed_keys = _keys_read(program_path(program))
    faults = [
        f"`{key}` is not a key that {program} reads"
        for key in config.keys() - keys - referred_to - FIXED.keys()
        # Files that torchtune ships switch off what their recipe does not have.
        if config[key] not in (None, False)
    ]
    faults += [f"`{key}` is absent" for key in needed_keys - OF_THE_GRAPH - config.keys()]
    for key, (value, why) in FIXED.items():
        if config.get(key, value) != value:
            faults.append(f"`{key}: {config[key]}` cannot be honored: {why}")
    for key in ("batch_size", "gradient_accumulation_steps", "epochs", "max_steps_per_epoch"):
        number = config.get(key, 1)
        is_no_limit = number is None and key == "max_steps_per_epoch"
        if not is_no_limit and not (type(number) is int and number >= 1):
            faults.append(f"`{key}` must be a whole number of at least 1, not {number}")
    if config.get("dtype") not in [*PRECISIONS]:
        faults.append(f"`dtype` must be one of {', '.join(PRECISIONS)}")
    for key in COMPONENTS:
        component = config.get(key)
        if key in config and not (isinstance(component, dict) and component.get("_component_")):
            faults.append(f"`{key}` has no `_component_`")
        elif key == "model" and component:
            faults += _model_faults(component)
        elif key == "optimizer" and component:
            rate = component.get("lr", 1)
            if type(rate) not in (int, float) or not 0 < rate <= 1:
                faults.append(f"`optimizer.lr` must be above 0 and at most 1, not {rate}")
    if program == "lora_dpo_single_device" and (config.get("model") or {}).get("use_dora"):
        faults.append(
            "`model.use_dora` cannot be honored: of DPO, only lora_dpo_distributed has it"
        )
    if faults:
        # Sets of keys come in another order in every process.
        raise ValueError("; ".join(sorted(faults)))


def _model_faults(model: dict[str, Any]) -> list[str]:
    package = model_package(model)
    faults = []
    if package not in MODEL_TYPES:
        faults.append(
            f"`model._component_: {model['_component_']}` cannot be honored: of torchtune's "
            f"models, only {', '.join(MODEL_TYPES)} compute what transformers computes"
        )
    faults += [
        f"`model.{size}` cannot be honored: the base model determines the sizes"
        for size in sorted(model.keys() - ADAPTER_KEYS - {"_component_"})
    ]
    return faults


def model_package(model: dict[str, Any]) -> str:
    """`llama3_2` of `torchtune.models.llama3_2.llama3_2_1b`."""
    match = re.fullmatch(r"torchtune\.models\.(\w+)\.\w+", str(model["_component_"]))
    return match[1] if match else ""


def _keys_read(program: Path) -> tuple[set[str], set[str]]:
    """The keys that a recipe's code reads, and those among them that it cannot do without."""
    # Recipes read this one by way of a constant, which a look at the code does not find.
    keys, needed_keys = {"profiler"}, set()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            needed_keys.add(node.attr)
        elif isinstance(node, ast.Call) and _is_config(getattr(node.func, "value", None)):
            keys |= {str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant)}
    needed_keys -= {"get"}
    return keys | needed_keys, needed_keys


def _is_config(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Name) and node.id == "cfg"


TAKEN_OVER = (
    "activation_checkpointing",
    "compile",
    "pipeline_parallel",
    "replicas",
    "tensor_parallel",
)
"""Keys of the placement that a torchtune configuration decides in its own words."""


class TorchtuneSettings(WarmStartSettings):
    """Runs a torchtune recipe, as `tune run <run> --config <config>` does, on the graph's rows.

    Batch, precision, optimizer and schedule are those of the torchtune configuration, and so is the
    budget unless `budget` is set. The global batch is `batch_size` times
    `gradient_accumulation_steps` times the number of workers. The weights have the configuration's
    `dtype`, too.
    """

    teaches = "recipes.torchtune.objective:objective"
    has_first_step = False
    recipe: Literal["torchtune"]
    """Which recipe this is."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """The precision given by the configuration's `dtype`, which the weights have, too."""
    run: Program
    """Which of torchtune's recipes to run."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Changes to the configuration by dotted key, such as `optimizer.lr: 1e-5`."""
    config: dict[str, Any]
    """A torchtune YAML file, the name of one that torchtune ships (`llama3_2/1B_full`), or the
    configuration itself."""
    data: Literal["pretraining", "conversations"] = "pretraining"
    """What it learns from: text, or the answers in conversations. Leave it unset for the DPO
    recipes, which learn from prompts with a chosen and a rejected answer."""

    @model_validator(mode="before")
    @classmethod
    def _without_teacher(cls, values: Any) -> Any:
        # Specs written while `teacher` was a setting have this key, and `forget` may train one of
        # those once more.
        if isinstance(values, dict) and values.get("teacher", "") is None:
            return {name: value for name, value in values.items() if name != "teacher"}
        return values

    @field_validator("config", mode="before")
    @classmethod
    def _read(cls, given: Any, validated: ValidationInfo) -> Any:
        # pydantic leaves out fields that are faulty, goes on with the others, and tells the faults
        # in the end.
        if not {"run", "overrides"} <= validated.data.keys():
            return {}
        return read_config(validated.data["run"], given, validated.data["overrides"])

    def faults(self) -> list[str]:
        faults = super().faults()
        if self.is_preference and self.data != "pretraining":
            faults.append(
                f"`data` cannot be combined with {self.run}, which learns from preferences"
            )
        kind, processes = self.run.removesuffix("_single_device"), self.placement.world_size
        if kind != self.run and processes > 1:
            faults.append(
                f"{processes} processes train (`placement.workers`), but {self.run} uses one "
                f"device. Set `run: {kind}_distributed`"
            )
        faults += [
            f"`{section}` comes from the torchtune configuration: change it with `overrides`, "
            f"such as {example}"
            for section, example in (
                ("optimizer", "optimizer.lr: 1e-5"),
                ("schedule", "lr_scheduler.num_warmup_steps: 10"),
            )
            # A section that equals its defaults counts as left out.
            if getattr(self, section) != type(getattr(self, section))()
        ]
        usual, batch_size = PlacementSettings(), self.config["batch_size"]
        faults += [
            f"`placement.{key}` comes from the torchtune configuration"
            for key in TAKEN_OVER
            if getattr(self.placement, key) != getattr(usual, key)
        ]
        if strategy := self.placement.strategy:
            faults.append(
                f"`{strategy.asked_by}` cannot be combined with torchtune, which spreads a model "
                "over GPUs and CPUs by itself"
            )
        if self.placement.device_batch_size not in (usual.device_batch_size, batch_size):
            faults.append(
                f"`placement.device_batch_size` comes from the configuration: {batch_size}"
            )
        precision = PRECISIONS[self.config["dtype"]]
        if self.precision not in ("auto", precision):
            faults.append(f"`precision` comes from the torchtune configuration: {precision}")
        return faults

    @model_validator(mode="after")
    def _take_over(self) -> Self:
        batch_size = self.config["batch_size"]
        rows, own = rows_per_step(self.config, self.placement.world_size), self.budget
        if "global_batch_size" in own.model_fields_set and own.global_batch_size != rows:
            raise ValueError(
                f"`budget.global_batch_size` comes from the torchtune configuration: {rows}, which "
                "is its batch_size times its gradient_accumulation_steps times the processes that "
                "train. Leave it out, or change those with `overrides`"
            )
        budget = {"global_batch_size": rows}
        if "budget" in self.model_fields_set:
            budget = self.budget.model_dump() | budget
        elif most := self.config.get("max_steps_per_epoch"):
            budget["steps"] = most * self.config.get("epochs", 1)
        else:
            budget["epochs"] = self.config.get("epochs", 1)
        placed = {"device_batch_size": batch_size}
        # Overrides of keys that only references read have had their effect, as in `read_config`.
        overrides = {k: v for k, v in self.overrides.items() if k.partition(".")[0] in self.config}
        return self.model_copy(
            update={
                "budget": BudgetSettings.model_validate(budget),
                "placement": self.placement.model_copy(update=placed),
                "precision": PRECISIONS[self.config["dtype"]],
                "overrides": overrides,
            }
        )

    @property
    def is_preference(self) -> bool:
        """Whether it learns which of two answers is the better one."""
        return is_preference(self.run)

    @property
    def form(self) -> Form:
        return "preferences" if self.is_preference else self.data

    @property
    def is_judged_in_bits(self) -> bool:
        return not self.is_preference

    @property
    def libraries(self) -> set[str]:
        return super().libraries | {"torchtune"}

    def longest_input(self, row_tokens: int) -> int:
        # Of two answers to a prompt, each is given to the model by itself.
        return row_tokens // 2 if self.is_preference else row_tokens

    def placed(self, processes: int) -> Self:
        placed = super().placed(processes)
        rows = rows_per_step(self.config, processes)
        budget = self.budget.model_copy(update={"global_batch_size": rows})
        return placed.model_copy(update={"budget": budget})

    def content(self) -> dict[str, Any]:
        values = super().content()
        del values["overrides"]
        # Of the configuration, what decides what is learned; references are resolved in it.
        keys, _ = _keys_read(program_path(self.run))
        config = {k: v for k, v in self.config.items() if k in keys and k not in EXECUTION}
        config["model"] = {k: v for k, v in self.config["model"].items() if k != "_component_"}
        return values | {"config": config}
