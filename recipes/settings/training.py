"""What the settings of all training recipes share; importing them loads no torch."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from artifacts.examples import Form
from artifacts.settings import Settings
from recipes.settings.deepspeed_configuration import contradictions
from recipes.settings.sections import (
    BudgetSettings,
    CheckpointingSettings,
    ExecutionSettings,
    ExportSettings,
    LoggingSettings,
    LoraSettings,
    OptimizerSettings,
    OrderSettings,
    PlacementSettings,
    ScheduleSettings,
    ValidationSettings,
)

ModelFamily = Literal["causal", "sequence_to_sequence", "encoder"]


class TrainingSettings(Settings):
    """What every training recipe has, in sections.

    The first sections decide what the checkpoint is and enter its fingerprint; `validation`,
    `placement`, `checkpointing` and `logging` say how the work is done and do not.
    """

    seed: int = Field(default=0, ge=0)
    """Decides the order of the data, and random weights where they are asked for."""
    precision: Literal["auto", "bfloat16", "float32"] = "auto"
    """bfloat16 keeps float32 master weights; auto takes it where the hardware is fast at it. What
    auto came to is part of the fingerprint."""
    replay_share: float = Field(default=0, ge=0, lt=1)
    """Share of the rows that are general text, replayed against forgetting, spread evenly;
    `clean_corpus.split.sources` names it. 0.05 to 0.25 are usual where text is at hand."""
    budget: BudgetSettings = BudgetSettings()
    order: OrderSettings = OrderSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    export: ExportSettings = ExportSettings()
    validation: ValidationSettings = ValidationSettings()
    placement: PlacementSettings = PlacementSettings()
    checkpointing: CheckpointingSettings = CheckpointingSettings()
    logging: LoggingSettings = LoggingSettings()

    @property
    def form(self) -> Form:
        """What a corpus for this recipe consists of."""
        return "pretraining"

    @property
    def family(self) -> ModelFamily:
        """Which kind of model it trains."""
        return "causal"

    def check_files(self) -> None:
        """Raise UserError where a file that is named here is not there; most name none."""

    def scoring(self) -> dict[str, Any]:
        """The settings that decide how models are compared, for the evaluation's fingerprint."""
        return {}

    @property
    def starts_from(self) -> Literal["base_model", "champion", "random"]:
        """Which weights training begins with."""
        return "base_model"

    @property
    def adapters(self) -> LoraSettings | None:
        """The adapters that are trained instead of all weights, if any."""
        return None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        faults = []
        warmup, steps = self.schedule.warmup_steps, self.budget.steps
        if steps and warmup and warmup > steps:
            faults.append(f"schedule.warmup_steps ({warmup}) is longer than the {steps} steps")
        if self.adapters and self.optimizer.name == "muon":
            faults.append("lora is trained with adamw")
        if self.placement.tensor_parallel > 1 and (self.adapters or self.optimizer.name == "muon"):
            faults.append("placement.tensor_parallel goes with neither lora nor muon")
        if self.placement.deepspeed:
            faults += self._beside_deepspeed()
        if self.placement.device == "tpu":
            faults += self._beside_tpu()
        if faults:
            raise ValueError("; ".join(faults))
        return self

    def _beside_deepspeed(self) -> list[str]:
        """What does not go with DeepSpeed, whatever its own settings."""
        own = contradictions(self.precision, self.budget, self.optimizer, self.placement)
        return self._beside("placement.deepspeed", {}) + own

    def _beside_tpu(self) -> list[str]:
        """What does not go with a TPU, whose chips one process drives by a program of XLA's."""
        placement = self.placement
        more = {
            "placement.workers": placement.workers > 1,
            "placement.deepspeed": placement.deepspeed is not None,
            "placement.activation_checkpointing": placement.activation_checkpointing,
        }
        return self._beside("placement.device: tpu", more)

    def _beside(self, other: str, more: dict[str, bool]) -> list[str]:
        """What needs FSDP2 over processes, and whatever else does not go with another way."""
        placement = self.placement
        refused = {
            "optimizer.name: muon": self.optimizer.name == "muon",
            "placement.replicas": placement.replicas > 1,
            "placement.tensor_parallel": placement.tensor_parallel > 1,
            "placement.compile: always": placement.compile == "always",
            "checkpointing.in_background: always": self.checkpointing.in_background == "always",
        } | more
        return [f"{other} does not go with {key}" for key in refused if refused[key]]

    def content(self) -> dict[str, Any]:
        """The settings that decide what the checkpoint is, for its fingerprint."""
        execution = {
            name
            for name in type(self).model_fields
            if isinstance(getattr(self, name), ExecutionSettings)
        }
        if self.export.weights == "best":
            # Which weights are the best depends on when they were compared, and on what.
            execution.remove("validation")
        return self.model_dump(mode="json", exclude=execution)


class WarmStartSettings(TrainingSettings):
    """Of recipes that begin with weights that have learnt already."""

    initialize: Literal["base_model", "champion"] = "base_model"
    """Start from the base model's weights, or from those of the model that serves; the learning
    rate warms up again."""

    @property
    def starts_from(self) -> Literal["base_model", "champion", "random"]:
        return self.initialize
