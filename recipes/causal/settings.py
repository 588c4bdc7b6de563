"""Recipes that train causal models on packed rows; importing this loads no torch."""

from typing import Any, Literal

from pydantic import Field

from artifacts.examples import Form
from artifacts.settings import Settings
from recipes.sections import LoraSettings
from recipes.settings import TrainingSettings, WarmStartSettings


class ContinuedPretrainingSettings(WarmStartSettings):
    """Continues training a pretrained model on your own text."""

    teaches = "recipes.causal.objective:next_token"
    recipe: Literal["continued_pretraining"] = "continued_pretraining"
    """Which recipe this is."""
    lora: LoraSettings | None = None
    """Train low-rank adapters instead of all weights; `lora: {}` uses the defaults."""

    @property
    def adapters(self) -> LoraSettings | None:
        return self.lora


class ExactMatchSettings(Settings):
    """How the model's answers are compared with the correct ones."""

    after: str | None = None
    """The marker whose last occurrence precedes the compared part of an answer, such as `####` in
    GSM8K; an answer without it is compared as a whole, as are all answers if this is unset. Commas
    between digits are ignored."""
    new_tokens: int = Field(default=256, ge=1)
    """Maximum number of tokens in an answer."""


class FineTuningSettings(ContinuedPretrainingSettings):
    """Teaches a causal model to answer: it learns only from the assistant's turns in
    conversations."""

    teaches = "recipes.causal.objective:answers"
    recipe: Literal["fine_tuning"]  # type: ignore[assignment]  # each recipe has its own
    """Which recipe this is."""
    exact_match: ExactMatchSettings | None = None
    """Let the gate decide by how often the last answer of a conversation is correct, instead of by
    bits per byte of answers, mostly tone and wording; `exact_match: {}` uses the defaults."""

    @property
    def form(self) -> Form:
        return "conversations"

    @property
    def is_judged_in_bits(self) -> bool:
        return self.exact_match is None

    def scoring(self) -> dict[str, Any]:
        return self.model_dump(mode="json", include={"exact_match"}, exclude_none=True)

    def content(self) -> dict[str, Any]:
        """Without what decides no weight."""
        values = super().content()
        del values["exact_match"]
        return values


class PretrainingSettings(TrainingSettings):
    """Trains randomly initialized weights in the base model's architecture, with its tokenizer."""

    teaches = "recipes.causal.objective:next_token"
    recipe: Literal["pretraining"]
    """Which recipe this is."""

    @property
    def starts_from(self) -> Literal["base_model", "champion", "random"]:
        return "random"
