"""The settings of DeepSpeed's ZeRO; importing them loads neither torch nor DeepSpeed."""

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from artifacts.settings import Settings

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


class DeepSpeedSettings(Settings):
    """Train with DeepSpeed's ZeRO (Rajbhandari et al., 2020) in the place of FSDP2.

    What `configuration` says on these counts where the section is silent.
    """

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
