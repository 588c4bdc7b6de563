"""The settings of DeepSpeed's ZeRO, and the configuration that it gets from them and a user's own.

Importing this loads neither torch nor DeepSpeed.
"""

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from recipes.settings import Precision, StrategySettings, TrainingSettings

Offload = Literal["none", "cpu", "nvme"]
AUTO = "auto"
"""What a configuration says where its reader is to choose, as for the Hugging Face Trainer."""

PLACES = (
    ("stage", ("stage",)),
    ("offload_optimizer", ("offload_optimizer", "device")),
    ("offload_parameters", ("offload_param", "device")),
    ("nvme_folder", ("offload_optimizer", "nvme_path")),
    ("nvme_folder", ("offload_param", "nvme_path")),
)
"""Settings of this section, and where a configuration has them, under `zero_optimization`."""

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
"""Keys of a user's configuration that reach DeepSpeed."""
REDUCE_BUCKET_NUMBERS = 50_000_000
"""Gradients that travel at once, a buffer of 0.2 GB; DeepSpeed's own default takes 2 GB."""
ELSEWHERE = {
    "activation_checkpointing": "placement.activation_checkpointing decides it",
    "bf16": "precision decides it",
    "fp16": "precision decides it",
    "gradient_accumulation_steps": "it follows from budget.global_batch_size, "
    "placement.device_batch_size and the number of workers",
    "gradient_clipping": "optimizer.gradient_clip decides it",
    "optimizer": "the section optimizer decides it",
    "scheduler": "the learning rate follows schedule",
    "torch_autocast": "precision decides it",
    "train_batch_size": "budget.global_batch_size decides it",
    "train_micro_batch_size_per_gpu": "placement.device_batch_size decides it",
}
"""Keys of a user's configuration that other settings decide, and which."""

SCRAMBLED = {
    "round_robin_gradients": "with it, DeepSpeed takes weights for others when it exports them or "
    "goes on with another number of workers. Begin a run that had it again",
    "elastic_checkpoint": "its checkpoints cannot be converted for another number of workers",
}
"""Keys of `zero_optimization` that are on or off, and what goes wrong below stage 3 with one on."""


class DeepSpeedSettings(StrategySettings):
    """Train with DeepSpeed's ZeRO (Rajbhandari et al., 2020) instead of FSDP2.

    A setting that is unset here takes its value from `configuration`, if that has one.
    """

    asked_by = "placement.deepspeed"
    builds = "recipes.deepspeed.strategy:build"
    libraries = frozenset({"torch", "deepspeed"})
    name: Literal["deepspeed"]
    stage: Literal[1, 2, 3] = 3
    """What is partitioned across the workers: the optimizer state (1), also the gradients (2), also
    the weights (3)."""
    offload_optimizer: Offload = "none"
    """Where to offload the optimizer state and its computation; `nvme` needs stage 3."""
    offload_parameters: Offload = "none"
    """Where to offload the weights until they are needed; `cpu` and `nvme` need stage 3."""
    nvme_folder: str | None = None
    """A folder on a fast local disk, for what is offloaded to NVMe; required for `nvme`."""
    configuration: dict[str, Any] = Field(default={})
    """A DeepSpeed configuration, or the path of a JSON file with one, for everything that no
    setting here decides, such as bucket sizes. A key that other settings decide, or that has no
    effect in these recipes, is rejected unless its value is `auto`."""

    @model_validator(mode="before")
    @classmethod
    def _read_configuration(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        configuration = values.get("configuration", {})
        if isinstance(configuration, str):
            configuration = _read(Path(configuration))
        # The field's own check tells what is wrong with it.
        if not isinstance(configuration, dict):
            return values
        zero = configuration.get("zero_optimization")
        if zero not in (None, AUTO) and not isinstance(zero, dict):
            raise ValueError(f"configuration's zero_optimization must be an object, not {zero!r}")
        settings: dict[str, Any] = {}
        for name, place in PLACES:
            value = _look_up(zero, place)
            if value in (None, AUTO):
                continue
            # A setting and the configuration may both say it, and so may two places of the
            # configuration.
            other = values.get(name, settings.get(name, value))
            if other != value:
                key = ".".join(place)
                raise ValueError(f"{name} is {other}, but configuration's {key} {value}")
            settings[name] = value
        return settings | values | {"configuration": configuration}

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

    def state_bytes(self, parameters: int, trained: int, moments: int, workers: int) -> float:
        # All numbers are float32, hence four bytes for each.
        divided = {stage: workers if self.stage >= stage else 1 for stage in (1, 2, 3)}
        weights = 4 * parameters / divided[3] if self.offload_parameters == "none" else 0.0
        if self.offload_optimizer != "none":
            return weights
        return weights + 4 * trained / divided[2] + 4 * moments * trained / divided[1]

    def faults(self, training: TrainingSettings) -> list[str]:
        user_config = self.configuration
        refused = {
            key: ELSEWHERE.get(key, "it has no effect in these recipes")
            for key in user_config
            if key not in PASSED_ON and not _is_automatic(user_config[key])
        }
        for key, why in SCRAMBLED.items() if self.stage < 3 else ():
            if _look_up(user_config, ("zero_optimization", key)) not in (None, False, AUTO):
                refused[f"zero_optimization.{key}"] = why
        return training.faults_beside(self.asked_by, {}) + [
            f"placement.deepspeed.configuration: remove {key}: {why}"
            for key, why in refused.items()
        ]


def _read(path: Path) -> Any:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must contain a JSON object")
    return content


def _look_up(values: Any, place: tuple[str, ...]) -> Any:
    for key in place:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def _is_automatic(value: Any) -> bool:
    return all(map(_is_automatic, value.values())) if isinstance(value, dict) else value == AUTO


def configuration(training: TrainingSettings, precision: Precision, workers: int) -> dict[str, Any]:
    """The configuration that DeepSpeed gets for a training by so many workers."""
    settings, rows = training.placement.strategy, training.budget.global_batch_size
    assert isinstance(settings, DeepSpeedSettings)
    user_config = settings.configuration
    # DeepSpeed reads null as a value, and fails; a person who writes it means that nothing is set.
    passed = {k: v for k in PASSED_ON if (v := user_config.get(k)) not in (None, AUTO)}
    zero = {"reduce_bucket_size": REDUCE_BUCKET_NUMBERS} | {
        key: value for key, value in passed.pop("zero_optimization", {}).items() if value != AUTO
    }
    zero["stage"] = settings.stage
    for key, device in (
        ("offload_optimizer", settings.offload_optimizer),
        ("offload_param", settings.offload_parameters),
    ):
        if device != "none":
            section = zero[key] if isinstance(zero.get(key), dict) else {}
            zero[key] = {k: v for k, v in section.items() if v != AUTO} | {"device": device}
        if device == "nvme":
            zero[key]["nvme_path"] = settings.nvme_folder
    share = rows // workers
    passes = -(-share // training.placement.device_batch_size)
    # DeepSpeed wants equal passes; the gradient is scaled by what they are.
    micro_batch = share // passes if share % passes == 0 else 1
    return {
        # The optimizers are torch's own, which need no compiler.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **passed,
        "train_batch_size": rows,
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_clipping": training.optimizer.gradient_clip,
        "torch_autocast": {"enabled": precision == "bfloat16", "dtype": "bfloat16"},
        "zero_optimization": zero,
    }
