"""Recipes that train encoders; importing this loads no torch."""

from typing import Literal

from artifacts.examples import Form
from recipes.settings import ModelFamily, WarmStartSettings


class ClassificationSettings(WarmStartSettings):
    """Teaches an encoder (RoBERTa, BERT, ...) to tell the classes of texts apart.

    Where the base model has no head for these classes, it gets a new one.
    """

    teaches = "recipes.encoders.classification:classes"
    recipe: Literal["classification"]
    """Which recipe this is."""
    class_weights: Literal["none", "balanced"] = "none"
    """`balanced` lets each class count alike, however few its examples are."""

    @property
    def form(self) -> Form:
        return "labeled"

    def longest_input(self, row_tokens: int) -> int | None:
        return None

    @property
    def family(self) -> ModelFamily:
        return "encoder"


class MaskedLanguageModelingSettings(WarmStartSettings):
    """Goes on training an encoder (RoBERTa, BERT, ...) to tell hidden tokens of the team's text.

    Of the tokens, 15% are hidden, others each time that a row is read.
    """

    teaches = "recipes.encoders.masked:hidden_tokens"
    recipe: Literal["masked_language_modeling"]
    """Which recipe this is."""

    @property
    def family(self) -> ModelFamily:
        return "encoder"
