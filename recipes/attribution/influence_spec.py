"""What the ranking by influence is told; importing this loads no torch."""

from pydantic import BaseModel, ConfigDict


class InfluenceSpec(BaseModel):
    """Which documents are to be ranked for which answer, and by which weights."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: list[str]
    """Hugging Face folders of the weights that one training went through, its own the last."""
    prompt: list[int]
    """Tokens that the answer was given to; may be empty."""
    answer: list[int]
    documents: list[list[int]]
    """Tokens of each."""
