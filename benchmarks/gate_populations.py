"""Per-document differences of two models, real and made up, for gate_calibration."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

POPULATION = 200_000
MEASURED = Path(__file__).parent / "gate_calibration_measured.csv"

Shape = Callable[[np.random.Generator, int], np.ndarray]

SHAPES: dict[str, Shape] = {
    "even": lambda random, size: random.standard_t(4, size),
    "few_large_gains": lambda random, size: (
        -(random.exponential(1.5, size) ** 1.3) + 0.4 * random.normal(size=size)
    ),
    "few_large_losses": lambda random, size: (
        random.exponential(1.5, size) ** 1.3 + 0.4 * random.normal(size=size)
    ),
    "rare_losses": lambda random, size: (
        0.3 * random.normal(size=size)
        + np.where(random.random(size) < 0.05, random.exponential(1.0, size), 0)
    ),
    "clusters": lambda random, size: random.standard_t(4, size),
}


@dataclass(frozen=True)
class Population:
    """All documents that samples are drawn from; their true difference is 0."""

    bytes: np.ndarray
    differences: np.ndarray
    """Candidate minus incumbent, bits per byte of each document."""
    cluster_size: int = 1
    """Near-copies in a cluster, which share a difference and are independent for a plain
    bootstrap."""

    @cached_property
    def bits(self) -> np.ndarray:
        """Differences in bits; their mean is 0, whatever the sizes they meet."""
        return self.differences * self.bytes

    def draw(
        self, rows: int, clusters: int, random: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Differences in bits, and bytes, of independent documents: shape (rows, clusters) each."""
        chosen = random.integers(len(self.bytes), size=(rows, clusters), dtype=np.int32)
        return self.bits[chosen], self.bytes[chosen]


def measured(sizes: np.ndarray, differences: np.ndarray) -> Population:
    """Documents of a real pair of models, their true difference taken away."""
    return Population(sizes, differences - (differences * sizes).sum() / sizes.sum())


def make(name: str, random: np.random.Generator) -> Population:
    """Documents of 200 to 2,500 bytes (median 770); small ones differ more, as they do."""
    size = np.clip(np.exp(random.normal(6.65, 0.8, POPULATION)), 200, 2_500).round()
    spread = 0.03 * (900 / size) ** 0.25
    differences = spread * SHAPES[name](random, POPULATION)
    differences -= (differences * size).sum() / size.sum()
    return Population(size, differences, 4 if name == "clusters" else 1)


def load_measured(factor: float) -> Population:
    """SmolLM2-135M and itself after 32 steps, the differences times a factor."""
    table = np.loadtxt(MEASURED, delimiter=",", skiprows=1)
    return measured(table[:, 0], factor * table[:, 1])
