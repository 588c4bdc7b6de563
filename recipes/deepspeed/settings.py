"""The settings of DeepSpeed's ZeRO, and the configuration that it gets from them and a user's own.

Importing this loads neither torch nor DeepSpeed.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from recipes.settings import StrategySettings, TrainingSettings

Offload = Literal["none", "cpu", "nvme"]
AUTO = "auto"
"""What a configuration says where its reader is to choose, as for the Hugging Face Trainer."""

PLACES = {
    "stage": ("stage",),
    "offload_optimizer": ("offload_optimizer", "device"),
    "offload_parameters": ("offload_param", "device"),
    "nvme_folder": ("offload_optimizer", "nvme_path"),
}
"""Settings of this section → where a configuration has them, under `zero_optimization`."""

SECTION = "placement.deepspeed.configuration"
PASSED_ON = (
    "aio",
    "comms_logger",
    "communication_data_type",
    "csv_monitor",
    "dump_state",
    "flops_profiler",
    "gradient_predivide_factor",
    "memory_breakdown",
    "prescale_gradients",
    "steps_per_print",
    "timers",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization",
)
"""Keys of a user's configuration that reach DeepSpeed; those in `_decided` are compared."""

MICRO_BATCH = "train_micro_batch_size_per_gpu"
BFLOAT16 = ("bf16.enabled", "torch_autocast.enabled")
ADAM_EPSILON = 1e-8
"""torch's default."""
REDUCE_BUCKET_NUMBERS = 50_000_000
"""Gradients that travel at once, a buffer of 0.2 GB; DeepSpeed's own default takes 2 GB."""
ELSEWHERE = {
    "activation_checkpointing": "placement.activation_checkpointing decides it",
    "gradient_accumulation_steps": "it follows from budget.global_batch_size, "
    "placement.device_batch_size and the number of workers",
    "scheduler": "the learning rate follows schedule",
}
"""Keys that have their place in other settings."""

Decided = dict[str, tuple[Any, str]]
"""Key of a configuration, dotted → the value that the settings give it, and the setting itself."""


class DeepSpeedSettings(StrategySettings):
    """Train with DeepSpeed's ZeRO (Rajbhandari et al., 2020) in the place of FSDP2.

    What `configuration` says on these counts where the section is silent.
    """

    asked_by = "placement.deepspeed"
    builds = "recipes.deepspeed.strategy:build"
    name: Literal["deepspeed"]
    stage: Literal[1, 2, 3] = 3
    """What is divided over the workers: the optimizer's state (1), gradients too (2), weights
    too (3)."""
    offload_optimizer: Offload = "none"
    """Where the optimizer's state and its arithmetic go from a GPU; nvme needs stage 3."""
    offload_parameters: Offload = "none"
    """Where the weights wait until they are needed; needs stage 3."""
    nvme_folder: str | None = None
    """A folder on a fast local disk, for what goes to nvme."""
    configuration: dict[str, Any] = Field(default={})
    """A DeepSpeed configuration, or the path of its JSON file, for all that no setting here
    decides, such as bucket sizes. What contradicts the settings is refused; `auto` never does."""

    @model_validator(mode="before")
    @classmethod
    def _read_configuration(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        configuration = values.get("configuration", {})
        if isinstance(configuration, str):
            configuration = _read(Path(configuration))
        if not isinstance(configuration, dict):
            return values
        zero = configuration.get("zero_optimization", {})
        told = {name: _look_up(zero, place) for name, place in PLACES.items()}
        known = {name: value for name, value in told.items() if value not in (None, AUTO)}
        return known | values | {"configuration": configuration}

    @model_validator(mode="after")
    def _check_stage(self) -> Self:
        faults = []
        if self.stage < 3 and self.offload_parameters != "none":
            faults.append(f"offload_parameters needs stage 3, not {self.stage}")
        if self.stage < 3 and self.offload_optimizer == "nvme":
            faults.append(f"offload_optimizer: nvme needs stage 3, not {self.stage}")
        to_disk = "nvme" in (self.offload_optimizer, self.offload_parameters)
        if to_disk and not self.nvme_folder:
            faults.append("offloading to nvme needs nvme_folder")
        if self.nvme_folder and not to_disk:
            faults.append("nvme_folder is given, but nothing is offloaded to nvme")
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def faults(self, training: TrainingSettings) -> list[str]:
        own = contradictions(self, training.precision, training)
        return training.faults_beside(self.asked_by, {}) + own


def _read(path: Path) -> Any:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} has to be a JSON object")
    return content


def _look_up(values: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def contradictions(
    settings: DeepSpeedSettings, precision: str, training: TrainingSettings
) -> list[str]:
    """What a user's configuration says otherwise than the settings, each fault naming both.

    Args:
        precision: of the training, which may be what `auto` came to.
    """
    decided = _decided(settings, precision, training)
    faults = []
    for key, value in _leaves(settings.configuration):
        if value == AUTO or (key in BFLOAT16 and precision == AUTO):
            continue
        if key in decided:
            wanted, setting = decided[key]
            if _comparable(value) != _comparable(wanted):
                faults.append(f"{SECTION}: {key} is {json.dumps(value)}, but {setting}")
        elif (section := key.split(".")[0]) not in PASSED_ON:
            why = ELSEWHERE.get(section, "it has no effect in these recipes")
            faults.append(f"{SECTION}: {key} has to be taken out: {why}")
    return faults


def configuration(
    is_bfloat16: bool,
    rows: int,
    workers: int,
    device_batch_size: int,
    gradient_clip: float,
    settings: DeepSpeedSettings,
) -> dict[str, Any]:
    """The configuration that DeepSpeed gets.

    Args:
        is_bfloat16: products in bfloat16, over float32 weights.
        rows: the global batch.
        workers: among which it is divided.
        device_batch_size: most rows per forward pass.
        gradient_clip: largest gradient norm.
        settings: checked by `contradictions`.
    """
    own = settings.configuration
    passed = {key: own[key] for key in PASSED_ON if own.get(key, AUTO) != AUTO}
    zero = {"reduce_bucket_size": REDUCE_BUCKET_NUMBERS} | {
        key: value for key, value in passed.pop("zero_optimization", {}).items() if value != AUTO
    }
    share = rows // workers
    passes = -(-share // device_batch_size)
    # DeepSpeed wants equal passes; the gradient is scaled by what they are.
    micro_batch = share // passes if share % passes == 0 else 1
    return {
        # The optimizers are torch's own, which need no compiler.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **passed,
        "train_batch_size": rows,
        MICRO_BATCH: micro_batch,
        "gradient_clipping": gradient_clip,
        "torch_autocast": {"enabled": is_bfloat16, "dtype": "bfloat16"},
        "zero_optimization": zero | _zero(zero, settings),
    }


def _zero(own: dict[str, Any], settings: DeepSpeedSettings) -> dict[str, Any]:
    section: dict[str, Any] = {"stage": settings.stage}
    offloads = {
        "offload_optimizer": settings.offload_optimizer,
        "offload_param": settings.offload_parameters,
    }
    for key, device in offloads.items():
        if device == "none":
            continue
        given = own.get(key)
        told = {k: v for k, v in given.items() if v != AUTO} if isinstance(given, dict) else {}
        folder = {"nvme_path": settings.nvme_folder} if device == "nvme" else {}
        section[key] = told | {"device": device} | folder
    return section


def _decided(settings: DeepSpeedSettings, precision: str, training: TrainingSettings) -> Decided:
    optimizer, rows = training.optimizer, training.budget.global_batch_size
    clip, name = optimizer.gradient_clip, optimizer.name
    micro_batch = training.placement.device_batch_size
    decided: Decided = {
        "train_batch_size": (rows, f"budget.global_batch_size is {rows}"),
        MICRO_BATCH: (micro_batch, f"placement.device_batch_size is {micro_batch}"),
        "gradient_clipping": (clip, f"optimizer.gradient_clip is {clip}"),
        "optimizer.type": (name, f"optimizer.name is {name}"),
        "optimizer.params.eps": (ADAM_EPSILON, f"AdamW's is {ADAM_EPSILON}"),
        "fp16.enabled": (False, f"precision is {precision}"),
    }
    adam = {"lr": "learning_rate", "betas": "betas", "weight_decay": "weight_decay"}
    for key, setting in adam.items():
        value = getattr(optimizer, setting)
        decided[f"optimizer.params.{key}"] = (value, f"optimizer.{setting} is {value}")
    for setting, *places in (
        ("stage", "stage"),
        ("offload_optimizer", "offload_optimizer.device"),
        ("offload_parameters", "offload_param.device"),
        ("nvme_folder", "offload_optimizer.nvme_path", "offload_param.nvme_path"),
    ):
        value = getattr(settings, setting)
        for place in places:
            told = f"placement.deepspeed.{setting} is {value}"
            decided[f"zero_optimization.{place}"] = (value, told)
    is_bfloat16 = (precision == "bfloat16", f"precision is {precision}")
    return decided | dict.fromkeys(BFLOAT16, is_bfloat16)


def _leaves(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in nested objects, by its dotted key."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _comparable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(value)
    # DeepSpeed's Adam decouples weight decay, so its two names mean one thing.
    name = value.lower() if isinstance(value, str) else value
    return "adamw" if name == "adam" else name
