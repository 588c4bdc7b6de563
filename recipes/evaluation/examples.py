"""What scores held-out examples one by one, for recipes that are not measured in bits."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from artifacts.shards.format import ShardStats
from recipes.evaluation.documents import Document
from recipes.evaluation.metric import Metric


@dataclass(frozen=True)
class ExampleScores:
    """One model's scores of some examples."""

    values: dict[str, np.ndarray]
    """Name to a score of each example, shape (examples,); the metric that decides among them."""
    figures: dict[str, float] = field(default_factory=dict)
    """Name to what is no mean over examples, such as a macro-averaged F1."""
    samples: list[dict[str, str]] = field(default_factory=list)
    """A few examples with what the model made of them, for people to look at."""
    details: dict[str, Any] = field(default_factory=dict)
    """More that the asset shows, as JSON."""


class Scorer(Protocol):
    """Scores models on held-out examples."""

    @property
    def metric(self) -> Metric:
        """What the gate decides by."""

    @property
    def identity(self) -> Any:
        """What decides the scores beside the examples, as JSON."""

    def score(self, folder: Path, examples: Sequence[Document], stats: ShardStats) -> ExampleScores:
        """The scores of the model in a folder; raises UserError where it cannot be read."""
