"""What the probe of a model's memory is told; importing this loads no torch."""

from pydantic import BaseModel, ConfigDict

from artifacts.shards.format import ShardStats, Split


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
