"""The YAML of a torchtune recipe: read, resolved, and refused where it cannot be honored.

Importing this loads neither torch nor torchtune, whose recipes lie in a folder that cannot be
imported: their files are found by the place of its distribution.
"""

import ast
import importlib.metadata
import re
from pathlib import Path
from typing import Any, Literal, get_args

import yaml

from artifacts.errors import first_line

Program = Literal[
    "full_finetune_single_device",
    "full_finetune_distributed",
    "lora_finetune_single_device",
    "lora_finetune_distributed",
    "full_dpo_distributed",
    "lora_dpo_single_device",
    "lora_dpo_distributed",
    "knowledge_distillation_single_device",
    "knowledge_distillation_distributed",
]

OF_THE_GRAPH = frozenset(
    {
        "output_dir",
        "tokenizer",
        "dataset",
        "checkpointer",
        "ref_checkpointer",
        "teacher_checkpointer",
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
"""Keys whose part the graph plays: they may stand in the file and are replaced."""
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
"""Keys that do not decide what comes of the training, the rows of a step being the same."""
FIXED: dict[str, tuple[Any, str]] = {
    "shuffle": (True, "rows are always in the order of `checkpoint.seed`"),
    "resume_from_checkpoint": (False, "a run goes on from its own checkpoints by itself"),
    "enable_async_checkpointing": (False, "`checkpoint.checkpointing.in_background` does it"),
    "save_adapter_weights_only": (False, "the whole model is evaluated and served"),
    "optimizer_in_bwd": (False, "a step could not be saved whole; use gradient accumulation"),
    "tensor_parallel_dim": (1, "of the recipes here `continued_pretraining` has it"),
    "tensor_parallel_plan": (None, "of the recipes here `continued_pretraining` has it"),
    "collate_fn": (None, "rows come packed"),
    "quantizer": (None, "nothing is quantized while it is trained, QLoRA aside"),
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
"""What a configuration says of its model beside which it is."""
MODELS = {"model": "the base model", "teacher_model": "the teacher's folder"}
"""Keys that name a model, and what says which weights and sizes it has."""
COMPONENTS = (*MODELS, "optimizer", "loss", "kd_loss")
"""Keys whose value names the code that is run."""
PRECISIONS = {"bf16": "bfloat16", "fp32": "float32"}
DISTRIBUTION = "torchtune"


def program_path(program: str) -> Path:
    """The file of one of torchtune's recipes."""
    return _installed(f"recipes/{program}.py")


def read_config(program: Program, given: Any, overrides: dict[str, Any]) -> dict[str, Any]:
    """The configuration that a recipe is run with, every reference in it resolved.

    Args:
        given: a YAML file, the name of one that torchtune ships, or the mapping itself.
        overrides: dotted key to value, as on the command line of `tune run`.

    Raises:
        ValueError: the file is absent or no configuration of this recipe, or has a key that cannot
            be honored; the message names it.
    """
    # Here, since all settings load this module and few name a torchtune recipe.
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = _load(given)
        for key, value in overrides.items():
            # As a line of YAML, in which 2e-5 is a number.
            OmegaConf.update(config, key, OmegaConf.create(f"value: {value}").value)
        text = OmegaConf.to_yaml(config)
        resolved = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"no torchtune configuration: {first_line(error)}") from None
    assert isinstance(resolved, dict)
    found = {str(key): value for key, value in resolved.items()}
    _check(program, found, _referred_to(text))
    return found


def rows_per_step(config: dict[str, Any], workers: int) -> int:
    """Rows of one optimizer step, over all workers."""
    return int(config["batch_size"] * config["gradient_accumulation_steps"] * workers)


def content(config: dict[str, Any], program: Program) -> dict[str, Any]:
    """The part of a configuration that decides what is learnt; references are resolved in it."""
    read, _ = _keys_read(program_path(program))
    model = {"model": {k: v for k, v in config["model"].items() if k != "_component_"}}
    return {k: v for k, v in config.items() if k in read and k not in EXECUTION} | model


def _installed(path: str) -> Path:
    return Path(str(importlib.metadata.distribution(DISTRIBUTION).locate_file(path)))


def _load(given: Any) -> Any:
    from omegaconf import OmegaConf

    if isinstance(given, dict):
        # By the same reader as a file, to which 2e-5 is a number.
        return OmegaConf.create(yaml.safe_dump(given))
    path, shipped = Path(str(given)), _installed(f"recipes/configs/{given}.yaml")
    if not path.is_file() and not shipped.is_file():
        raise ValueError(
            f"there is no file {given}, and torchtune ships no configuration of that name; `tune "
            "ls` lists them"
        )
    config = OmegaConf.load(path if path.is_file() else shipped)
    if not OmegaConf.is_dict(config):
        raise ValueError(f"{path} is no YAML mapping")
    return config


def _check(program: Program, config: dict[str, Any], referred_to: set[str]) -> None:
    read, needed = _keys_read(program_path(program))
    faults = [
        f"`{key}` is no key that {program} reads"
        for key in config.keys() - read - referred_to - FIXED.keys()
        # Files that torchtune ships switch off what their recipe does not have.
        if config[key] not in (None, False)
    ]
    faults += [f"`{key}` is absent" for key in needed - OF_THE_GRAPH - config.keys()]
    for key, (value, why) in FIXED.items():
        if config.get(key, value) != value:
            faults.append(f"`{key}: {config[key]}` cannot be honored: {why}")
    for key in ("batch_size", "gradient_accumulation_steps", "epochs", "max_steps_per_epoch"):
        found = config.get(key)
        if found is not None and not (isinstance(found, int) and found >= 1):
            faults.append(f"`{key}` has to be a whole number from 1 on, not {found}")
    if config.get("dtype") not in PRECISIONS:
        faults.append(f"`dtype` has to be one of {', '.join(PRECISIONS)}")
    for key in COMPONENTS:
        component = config.get(key)
        if key in config and not (isinstance(component, dict) and component.get("_component_")):
            faults.append(f"`{key}` names no `_component_`")
        elif key in MODELS and component:
            faults += _model_faults(key, component)
    if program == "lora_dpo_single_device" and (config.get("model") or {}).get("use_dora"):
        faults.append("`model.use_dora` cannot be honored: of DPO, lora_dpo_distributed has it")
    if faults:
        raise ValueError("; ".join(sorted(faults)))


def _model_faults(key: str, model: dict[str, Any]) -> list[str]:
    package = model_package(model)
    faults = []
    if package not in MODEL_TYPES:
        faults.append(
            f"`{key}._component_: {model['_component_']}` cannot be honored: of torchtune's "
            f"models, those of {', '.join(MODEL_TYPES)} give what transformers gives"
        )
    faults += [
        f"`{key}.{size}` cannot be honored: {MODELS[key]} says how large the model is"
        for size in sorted(model.keys() - ADAPTER_KEYS - {"_component_"})
    ]
    return faults


def model_package(model: dict[str, Any]) -> str:
    """`llama3_2` of `torchtune.models.llama3_2.llama3_2_1b`."""
    found = re.fullmatch(r"torchtune\.models\.(\w+)\.\w+", str(model["_component_"]))
    return found[1] if found else ""


def _referred_to(text: str) -> set[str]:
    """Top-level keys that other values of the configuration are made of."""
    return set(re.findall(r"\$\{(\w+)", text))


def _keys_read(program: Path) -> tuple[set[str], set[str]]:
    """The keys that a recipe's code reads, and those among them that it cannot do without."""
    read, needed = {"profiler"}, set()
    for node in ast.walk(ast.parse(program.read_text())):
        if isinstance(node, ast.Attribute) and _is_config(node.value):
            needed.add(node.attr)
        elif isinstance(node, ast.Call) and _is_config(getattr(node.func, "value", None)):
            read |= {str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant)}
    needed -= {"get"}
    return read | needed, needed


def _is_config(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Name) and node.id == "cfg"


PROGRAMS: tuple[str, ...] = get_args(Program)
