"""What the programs of attribution are told; importing this loads no torch."""

from pydantic import BaseModel, ConfigDict

from artifacts.shards.format import ShardStats, Split


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


class MemorySpec(BaseModel):
    """Whose memory of which texts is to be measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: dict[str, str]
    """Role to Hugging Face folder."""
    shards_folder: str
    shards: ShardStats
    splits: list[Split]
    """Where texts and controls are."""
    texts: list[str]
    """By their `text_hash`."""
    controls: list[str]
    """Texts that no model was trained on, by their `text_hash`."""
