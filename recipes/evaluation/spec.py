"""What the evaluation program is told."""

from typing import Literal

from pydantic import Field

from artifacts.settings import Settings
from artifacts.shards.format import ShardStats
from recipes.evaluation.settings import EvaluationSettings, Folder, GateQuestion, ModelSource
from recipes.settings import RecipeSettings, training_settings


class EvaluationSpec(Settings):
    """What `python -m recipes.evaluate --spec` reads."""

    base: ModelSource
    """The model that training started from."""
    candidate: ModelSource
    """The model just trained."""
    incumbent: ModelSource | None = None
    """The model that serves now, or None before the first."""
    shards: Folder
    """Folder of the `tokenized_shards` artifact."""
    shard_stats: ShardStats
    """That artifact's `stats`."""
    exam: Folder | None = None
    """Folder of the `exam` artifact, whose questions are asked besides."""
    output: Folder
    """Folder to write `result.json`, `scores.parquet` and `samples.json` into."""
    cache: Folder | None = None
    """Folder of what earlier runs have measured (`artifacts.cache`); None keeps nothing."""
    settings: EvaluationSettings = EvaluationSettings()
    """What to measure."""
    recipe: RecipeSettings = Field(default_factory=lambda: training_settings({}))
    """The recipe that the candidate was trained by, which says how it is scored."""
    split: Literal["held_out", "validation"] = "held_out"
    """Which documents the models are measured on; the tasks are called after it. Held-out text is
    for the gate alone, validation text for whoever chooses settings."""
    libraries: dict[str, str] = Field(default_factory=dict)
    """Versions of those that decide the result, without which the program does not run."""
    question: GateQuestion | None = None
    """Ends the measuring when it is answered; None measures all that the settings allow."""
