"""What a recipe is judged by: one figure an example, paired over models."""

from pydantic import BaseModel, ConfigDict

GENERAL_TASK = "general"
"""The name under which general text is measured."""


class Metric(BaseModel):
    """A figure that is a sum of scores over a sum of sizes, of documents or examples."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """As the evaluation reports it: `held_out_<name>`."""
    unit: str
    """In words, such as `bits per byte`."""
    higher_is_better: bool = False
    has_general: bool = False
    """Whether forgetting is measured as well, on general text."""
    is_bits: bool = False
    """Whether scores are bits, so that a draw from the vocabulary says what chance would score."""

    def of(self, task: str) -> "Metric":
        """What the documents of a task are measured by.

        Usually the same; but a score that counts right examples says nothing of general text,
        which is measured in bits then.
        """
        return BITS_PER_BYTE if task == GENERAL_TASK and self.higher_is_better else self


ANSWER_BITS_PER_BYTE = Metric(
    name="bits_per_byte", unit="bits per byte of answers", has_general=True, is_bits=True
)
BITS_PER_BYTE = Metric(name="bits_per_byte", unit="bits per byte", has_general=True, is_bits=True)
