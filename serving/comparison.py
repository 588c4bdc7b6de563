"""What was judged is what serves: an engine's bits beside those that the evaluation measured."""

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from serving.settings import Weights

LIMITS: dict[Weights, tuple[float, float]] = {
    "f32": (0.005, 0.02),
    "bf16": (0.005, 0.02),
    "int8": (0.01, 0.04),
    "int4": (0.10, 0.20),
}
"""Share of the evaluation's bits by which the engine's may differ, for all documents together and
for a single one. f32 and bf16 have the same, as both round to bfloat16 where that is fast."""
ROUNDING_BITS = 0.25
"""What rounding may add to a single document's bits, times the root of its tokens, whose errors are
independent. Of a short text that a model knows by heart it is more than any share of its bits."""


class JudgedDocument(BaseModel):
    """A held-out document and what the evaluation found."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    bytes: int
    """Of the text that was measured."""
    bits: float
    windows: list[list[int]]
    """Tokens of each stretch that was read in one pass; each predicts those after its first."""
    counted: list[list[bool]] = []
    """Of a conversation, which of the predicted tokens of each stretch are an answer's; empty where
    all count."""

    @property
    def predicted(self) -> int:
        """Tokens whose bits are summed."""
        if self.counted:
            return sum(map(sum, self.counted))
        return sum(len(window) - 1 for window in self.windows)


class EngineComparison(BaseModel):
    """An engine's bits beside the evaluation's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    documents: int
    evaluated: float
    """Bits per byte, as the evaluation measured."""
    served: float
    """Bits per byte, as the engine says."""
    largest: float
    """Of the documents' differences, beyond `ROUNDING_BITS`, as a share of their bits."""
    largest_in: str
    """The document with that difference."""
    weights: Weights

    @property
    def fits(self) -> bool:
        """Whether the engine serves what was judged, as its weights' format allows."""
        of_all, of_one = LIMITS[self.weights]
        return abs(self.served / self.evaluated - 1) <= of_all and self.largest <= of_one

    def __str__(self) -> str:
        of_all, of_one = LIMITS[self.weights]
        worst = f"{self.largest:.2%} in {self.largest_in}" if self.largest > 0 else "none"
        return (
            f"{self.served:.4f} bits per byte served in {self.weights}, {self.evaluated:.4f} "
            f"evaluated, on {self.documents} documents (difference "
            f"{self.served / self.evaluated - 1:+.2%}, limit {of_all:.1%}; largest of a "
            f"document, beyond rounding: {worst}, limit {of_one:.1%})"
        )


def compared(
    documents: Sequence[JudgedDocument], found: Sequence[float], weights: Weights
) -> EngineComparison:
    """The comparison of documents with the bits that an engine found for each."""
    size = sum(document.bytes for document in documents)
    differences = [
        math.inf
        # An engine that leaves out a token's probability fits no limit.
        if math.isnan(bits)
        else max(0.0, abs(bits - document.bits) - ROUNDING_BITS * math.sqrt(document.predicted))
        / document.bits
        for bits, document in zip(found, documents, strict=True)
    ]
    largest = max(differences)
    return EngineComparison(
        documents=len(documents),
        evaluated=sum(document.bits for document in documents) / size,
        served=sum(found) / size,
        largest=largest,
        largest_in=documents[differences.index(largest)].id,
        weights=weights,
    )
