"""Settings of the recipe that runs torchtune's own; importing them loads no torch."""

from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from artifacts.errors import UserError
from artifacts.examples import Form
from artifacts.storage import files
from artifacts.storage.checksums import sha256_of
from artifacts.store.identity import hash_json
from recipes.settings.sections import BudgetSettings, PlacementSettings
from recipes.settings.torchtune_config import (
    PRECISIONS,
    Program,
    content,
    read_config,
    rows_per_step,
)
from recipes.settings.training import WarmStartSettings

TAKEN_OVER = ("activation_checkpointing", "compile", "deepspeed", "replicas", "tensor_parallel")
"""Keys of the placement that a torchtune configuration decides in its own words."""


class TorchtuneSettings(WarmStartSettings):
    """Runs a recipe of torchtune, as `tune run <run> --config <config>` does, on the graph's rows.

    Budget, batch, precision, optimizer and schedule are those of the torchtune configuration.
    """

    recipe: Literal["torchtune"]
    """Which recipe this is."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """That of the configuration's `dtype`, of which the weights are as well."""
    run: Program
    """Which of torchtune's recipes runs."""
    overrides: dict[str, Any] = Field(default_factory=dict)
    """Changes to the configuration, dotted key to value, such as `optimizer.lr: 1e-5`."""
    config: dict[str, Any]
    """A torchtune YAML file, the name of one that torchtune ships (`llama3_2/1B_full`), or its
    content."""
    data: Literal["pretraining", "conversations"] = "pretraining"
    """What it learns from: text, or the answers in conversations. The recipes of DPO learn from
    prompts with a chosen and a rejected answer."""
    teacher: str | None = None
    """Of knowledge distillation, the Hugging Face folder of the model that is learnt from; what is
    in it is part of the fingerprint."""

    @field_validator("config", mode="before")
    @classmethod
    def _read(cls, given: Any, validated: ValidationInfo) -> Any:
        if not {"run", "overrides"} <= validated.data.keys():
            return {}
        return read_config(validated.data["run"], given, validated.data["overrides"])

    @model_validator(mode="after")
    def _take_over(self) -> Self:
        faults = [
            f"`{section}` is that of the torchtune configuration: change it by `overrides`, such "
            f"as {example}"
            for section, example in (
                ("optimizer", "optimizer.lr: 1e-5"),
                ("schedule", "lr_scheduler.num_warmup_steps: 10"),
            )
            if getattr(self, section) != type(getattr(self, section))()
        ]
        faults += self._run_faults()
        usual, batch_size = PlacementSettings(), self.config["batch_size"]
        faults += [
            f"`placement.{key}` is that of the torchtune configuration"
            for key in TAKEN_OVER
            if getattr(self.placement, key) != getattr(usual, key)
        ]
        if self.placement.deepspeed:
            faults.append("`placement.deepspeed` does not go with torchtune, which has FSDP2")
        if self.placement.device == "tpu":
            faults.append(
                "`placement.device: tpu` does not go with torchtune, whose recipes run on GPUs and "
                "processors"
            )
        if self.placement.device_batch_size not in (usual.device_batch_size, batch_size):
            faults.append(f"`placement.device_batch_size` is the configuration's, {batch_size}")
        precision = PRECISIONS[self.config["dtype"]]
        if self.precision not in ("auto", precision):
            faults.append(f"`precision` is that of the torchtune configuration, {precision}")
        if faults:
            raise ValueError("; ".join(faults))
        budget = {"global_batch_size": rows_per_step(self.config, self.placement.workers)}
        if "budget" in self.model_fields_set:
            budget = self.budget.model_dump() | budget
        elif most := self.config.get("max_steps_per_epoch"):
            budget["steps"] = most * self.config.get("epochs", 1)
        else:
            budget["epochs"] = self.config.get("epochs", 1)
        placed = {"device_batch_size": batch_size}
        return self.model_copy(
            update={
                "budget": BudgetSettings.model_validate(budget),
                "placement": self.placement.model_copy(update=placed),
                "precision": precision,
            }
        )

    def _run_faults(self) -> list[str]:
        """What does not go with torchtune's recipe."""
        faults = []
        if self.is_preference and self.data != "pretraining":
            faults.append(f"`data` does not go with {self.run}, which learns from preferences")
        if self.is_distillation and not self.teacher:
            faults.append(f"`teacher` is absent, the folder of the model {self.run} learns from")
        if self.teacher and not self.is_distillation:
            faults.append(f"`teacher` does not go with {self.run}, which has none")
        if self.run.endswith("_single_device") and self.placement.workers > 1:
            faults.append(f"`placement.workers` is above 1, but {self.run} is of one device")
        return faults

    @property
    def is_preference(self) -> bool:
        """Whether it learns which of two answers is the better one."""
        return "_dpo_" in self.run

    @property
    def is_distillation(self) -> bool:
        """Whether it learns from another model's probabilities as well."""
        return self.run.startswith("knowledge_distillation")

    @property
    def form(self) -> Form:
        return "preferences" if self.is_preference else self.data

    def check_files(self) -> None:
        if self.teacher:
            _weight_files(self.teacher)

    def content(self) -> dict[str, Any]:
        """The same, of the configuration what decides what is learnt."""
        found = super().content()
        del found["overrides"], found["teacher"]
        teacher = {"teacher": _digest(self.teacher)} if self.teacher else {}
        return found | {"config": content(self.config, self.run)} | teacher


def _digest(folder: str) -> str:
    """A hash of what decides a model's answers, wherever its folder lies."""
    names = ["config.json", *_weight_files(folder)]
    return hash_json({name: sha256_of(f"{folder}/{name}") for name in names})


def _weight_files(folder: str) -> list[str]:
    names = files.list_names(folder)
    weights = [name for name in names if name.endswith(".safetensors")]
    if not weights or "config.json" not in names:
        raise UserError(
            f"`checkpoint.teacher`: {folder} is no Hugging Face model folder: a config.json and "
            "weights in safetensors belong there."
        )
    return weights
