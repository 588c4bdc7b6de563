"""What a recipe is judged by: one figure an example, paired over models."""

from pydantic import BaseModel, ConfigDict


class Metric(BaseModel):
    """A figure that is a sum of scores over a sum of sizes, of documents or examples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """As the evaluation reports it: `held_out_<name>`."""
    unit: str
    """In words, such as `bits per byte`."""
    higher_is_better: bool = False
    has_general: bool = False
    """Whether forgetting is measured as well, by the same figure on general text."""
    is_bits: bool = False
    """Whether scores are bits, so that a draw from the vocabulary says what chance would score."""


ANSWER_BITS_PER_BYTE = Metric(
    name="bits_per_byte", unit="bits per byte of answers", has_general=True, is_bits=True
)
BITS_PER_BYTE = Metric(name="bits_per_byte", unit="bits per byte", has_general=True, is_bits=True)
