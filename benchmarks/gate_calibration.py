"""How often the gate promotes a model that is not better, and one that is.

Pairs of models are simulated by their per-document differences in bits per byte. Nobody knows
beforehand which shape of differences a training run brings, so there are six: those measured
between SmolLM2-135M and itself after 32 steps on package documentation (447 held-out documents, in
gate_calibration_measured.csv) and their mirror image; and made-up ones, even, mostly small gains
with a few large ones, mostly small losses with a few large ones, and in clusters of near-copies.

A pair's true difference is moved to 0 (equal models), to minus the smallest effect (the hardest
case that must not be promoted), and to twice and four times the smallest effect (which should be).
Moving all documents' rates by one amount moves the interval by exactly that amount, so one interval
a pair serves all four.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.harness import Check, at_most, keep
from llm_assets.gate.settings import GateSettings
from recipes.evaluation.bootstrap import studentized_interval

PAIRS = 2_000
SIZES = (30, 200, 1_000)
RESAMPLES = 1_000
POPULATION = 400_000
MEASURED = Path(__file__).parent / "gate_calibration_measured.csv"
STATED = 0.025
EFFECT = GateSettings().smallest_effect

Shape = Callable[[np.random.Generator, int], np.ndarray]

SHAPES: dict[str, Shape] = {
    "even": lambda random, size: random.standard_t(4, size),
    "few_large_gains": lambda random, size: (
        -(random.exponential(1.5, size) ** 1.3) + 0.4 * random.normal(size=size)
    ),
    "few_large_losses": lambda random, size: (
        random.exponential(1.5, size) ** 1.3 + 0.4 * random.normal(size=size)
    ),
    "clusters": lambda random, size: random.standard_t(4, size),
}


@dataclass(frozen=True)
class Population:
    """All documents that samples are drawn from; their true difference is 0."""

    bytes: np.ndarray
    differences: np.ndarray
    """Candidate minus incumbent, bits per byte of each document."""
    cluster_size: int
    """Near-copies a cluster; they share a difference."""


def measured_population(sign: float) -> Population:
    """Documents of a real pair of models; their mirror image for a sign of -1."""
    table = np.loadtxt(MEASURED, delimiter=",", skiprows=1)
    size, differences = table[:, 0], sign * table[:, 1]
    return Population(size, differences - (differences * size).sum() / size.sum(), 1)


def make_population(name: str, random: np.random.Generator) -> Population:
    """Documents of 200 to 2,500 bytes (median 770); small ones differ more, as they do."""
    size = np.clip(np.exp(random.normal(6.65, 0.8, POPULATION)), 200, 2_500).round()
    spread = 0.03 * (900 / size) ** 0.25
    rate = np.exp(random.normal(np.log(1.16), 0.16, POPULATION))
    differences = spread * SHAPES[name](random, POPULATION) - 0.02 * (rate - 1.16)
    differences -= (differences * size).sum() / size.sum()
    return Population(size, differences, 4 if name == "clusters" else 1)


def upper_bounds(population: Population, clusters: int, random: np.random.Generator) -> np.ndarray:
    """The gate's bound and the plain percentile's, for every pair: shape (pairs, 2)."""
    bounds = np.empty((PAIRS, 2))
    for pair in range(PAIRS):
        drawn = random.integers(len(population.bytes), size=clusters)
        copies = np.repeat(drawn, population.cluster_size)
        size = population.bytes[copies]
        bits = population.differences[copies] * size
        names = np.repeat(np.arange(clusters), population.cluster_size)
        interval = studentized_interval(bits, size, names, resamples=RESAMPLES, seed=pair)
        # The peer knows nothing of clusters: it resamples documents.
        bounds[pair] = interval.high, percentile_bound(bits, size, random)
    return bounds


def percentile_bound(bits: np.ndarray, size: np.ndarray, random: np.random.Generator) -> float:
    """Upper 97.5 % bound of a plain percentile bootstrap over documents."""
    chosen = random.integers(len(bits), size=(RESAMPLES, len(bits)))
    return float(np.quantile(bits[chosen].sum(axis=1) / size[chosen].sum(axis=1), 1 - STATED))


def main() -> None:
    """Simulate, print a line a case, and keep the worst rates."""
    checks: dict[str, Check] = {}
    worst = {"ours": 0.0, "peer": 0.0}
    random = np.random.default_rng(0)
    populations = {"measured": measured_population(1), "mirrored": measured_population(-1)}
    populations |= {name: make_population(name, random) for name in SHAPES}
    for name, population in populations.items():
        for clusters in SIZES:
            bounds = upper_bounds(population, clusters, random)
            for case, true in {"equal": 0.0, "hardest_null": -EFFECT}.items():
                ours, peer = (bounds + true < -EFFECT).mean(axis=0)
                checks[f"{name}_{clusters}_{case}"] = at_most(float(ours), STATED)
                worst["ours"] = max(worst["ours"], float(ours))
                worst["peer"] = max(worst["peer"], float(peer))
                print(f"{name}, {clusters}, {case}: ours {ours:.2%}, percentile {peer:.2%}")
            for times in (2, 4):
                power = float((bounds[:, 0] - times * EFFECT < -EFFECT).mean())
                checks[f"{name}_{clusters}_power_{times}x"] = Check(power, "reported", True)
                print(f"{name}, {clusters}, {times} x smallest effect: promoted {power:.0%}")
    keep(
        "gate_calibration",
        [worst["ours"]],
        [worst["peer"]],
        "highest rate of false promotions",
        "plain percentile bootstrap over documents",
        "lower",
        ["numpy", "scipy"],
        checks,
    )


if __name__ == "__main__":
    main()
