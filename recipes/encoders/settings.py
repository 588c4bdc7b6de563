"""Recipes that train encoders; importing this loads no torch."""

from typing import Literal

from artifacts.examples import Form
from recipes.settings import WarmStartSettings


class ClassificationSettings(WarmStartSettings):
    """Teaches an encoder (RoBERTa, BERT, ...) to classify texts.

    The model gets a new head unless it already has one. Of a head for other classes, those with the
    same name are kept; one whose classes have no names is kept if it has as many classes.
    """

    teaches = "recipes.encoders.classification:classes"
    family = "encoder"
    recipe: Literal["classification"]
    """Which recipe this is."""
    class_weights: Literal["none", "balanced"] = "none"
    """`balanced` gives every class the same total weight in the loss, however few examples it has;
    `none` gives every example the same weight."""

    @property
    def form(self) -> Form:
        return "labeled"

    def longest_input(self, row_tokens: int) -> int | None:
        return None


class MaskedLanguageModelingSettings(WarmStartSettings):
    """Continues training an encoder (RoBERTa, BERT, ...) to predict masked tokens of your own text.

    15% of the tokens are predicted, different ones each time a row is read.
    """

    teaches = "recipes.encoders.masked:hidden_tokens"
    family = "encoder"
    needs_masked_head = True
    recipe: Literal["masked_language_modeling"]
    """Which recipe this is."""
