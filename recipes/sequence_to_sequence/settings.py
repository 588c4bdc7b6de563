"""The recipe that writes targets for inputs; importing this loads no torch."""

from typing import Any, Literal

from pydantic import Field

from artifacts.examples import Form
from artifacts.settings import Settings
from recipes.settings import WarmStartSettings


class TextGenerationSettings(Settings):
    """How a sequence-to-sequence model generates text in the evaluation. These are also the
    exported model's defaults."""

    num_beams: int = Field(default=1, ge=1)
    """Number of beams; 1 is greedy decoding. With more, the endpoint returns an answer only when
    it is complete."""
    length_penalty: float = Field(default=1.0)
    """With several beams, values above 0 favor longer texts."""
    no_repeat_ngram_size: int = Field(default=0, ge=0)
    """Length of the token n-grams that must not repeat; 0 sets no limit."""


class SequenceToSequenceSettings(WarmStartSettings):
    """Teaches an encoder-decoder model (T5, mT5, BART) to write a target for an input."""

    teaches = "recipes.sequence_to_sequence.objective:targets"
    family = "sequence_to_sequence"
    recipe: Literal["sequence_to_sequence"]
    """Which recipe this is."""
    generation: TextGenerationSettings = TextGenerationSettings()
    metric: Literal["rouge1", "rouge2", "rougeL", "exact_match"] = "rougeL"
    """The metric by which the gate decides, example by example; the others are reported."""

    @property
    def form(self) -> Form:
        return "pairs"

    def scoring(self) -> dict[str, Any]:
        return self.model_dump(mode="json", include={"generation", "metric"})

    def longest_input(self, row_tokens: int) -> int | None:
        return None
