"""The recipe that writes targets for inputs; importing this loads no torch."""

from typing import Any, Literal

from pydantic import Field

from artifacts.examples import Form
from artifacts.settings import Settings
from recipes.settings import ModelFamily, WarmStartSettings


class TextGenerationSettings(Settings):
    """How a sequence-to-sequence model writes, in the evaluation and, as the exported model's
    defaults, where it is used."""

    num_beams: int = Field(default=1, ge=1)
    """Beams of the search; 1 takes the most likely token each time. With several, the
    endpoint gives an answer whole, at its end."""
    length_penalty: float = Field(default=1.0, allow_inf_nan=False)
    """Above 0 favors longer texts, where there are several beams."""
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    """Length of the runs of tokens that are never repeated; 0 allows all."""


class SequenceToSequenceSettings(WarmStartSettings):
    """Teaches an encoder-decoder model (T5, mT5, BART) to write a target for an input."""

    teaches = "recipes.sequence_to_sequence.objective:targets"
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

    def longest_input(self, row_tokens: int) -> int | None:
        return None
