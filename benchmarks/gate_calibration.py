"""How often a pipeline ever promotes a model that is not better, and how often one that is.

A year is a sequence of candidates none of which is better than the champion in truth: each one's
true difference is 0. Nobody knows beforehand which shape the per-document differences of two models
have, so there are six: those measured between SmolLM2-135M and itself after 32 steps on package
documentation (447 held-out documents, in gate_calibration_measured.csv) and their mirror image; and
made-up ones: even, mostly small gains with a few large ones, mostly small losses with a few large
ones, and in clusters of near-copies.

Two searchers try for a year. One retries with other seeds; half of the variance of its candidates'
differences is common to all of them. The other one reads the scores: it keeps every variation that
scored better, and its next candidate joins all that it kept with a new variation (Blum & Hardt
2015, section 4, call it boosting).

Three rules face them: the gate, which measures each candidate on documents drawn for it from the
held-out set; the rule before it, which measured all on the same documents and judged each as if it
were the only one (2.5 % against the smallest effect, by a widened Student's t); and a plain
percentile bootstrap used week by week on the same documents, resolved by its normal limit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from scipy.stats import norm, t

from benchmarks.harness import Check, at_least, at_most, keep
from llm_assets.gate.bounds import reach, spend, summarize
from llm_assets.gate.settings import GateSettings

YEARS = {52: 400, 500: 100}
"""Candidates of a year to years simulated."""
SIZES = (30, 200, 1_000)
"""Independent documents measured."""
HELD_OUT = 12
"""Documents held out for each one measured; the default pipeline measures 46 of 539."""
PAIRS = 4_000
POPULATION = 200_000
MEASURED = Path(__file__).parent / "gate_calibration_measured.csv"
GATE = GateSettings()
EFFECT = GATE.smallest_effect
BEFORE = 0.025
SHARED = math.sqrt(0.5)
"""Of two candidates' differences, the root of the variance that they have in common."""
LOOKS = (1, 10, 52, 500)

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
RULES = ("ours", "before", "weekly")


@dataclass(frozen=True)
class Population:
    """All documents that samples are drawn from; their true difference is 0."""

    bytes: np.ndarray
    differences: np.ndarray
    """Candidate minus incumbent, bits per byte of each document."""
    cluster_size: int
    """Near-copies in a cluster, which share a difference and are independent for a plain
    bootstrap."""

    @cached_property
    def bits(self) -> np.ndarray:
        """Differences in bits; their mean is 0, whatever the sizes they meet."""
        return self.differences * self.bytes


def measured_population(sign: float) -> Population:
    """Documents of a real pair of models; their mirror image for a sign of -1."""
    table = np.loadtxt(MEASURED, delimiter=",", skiprows=1)
    size, differences = table[:, 0], sign * table[:, 1]
    return Population(size, differences - (differences * size).sum() / size.sum(), 1)


def make_population(name: str, random: np.random.Generator) -> Population:
    """Documents of 200 to 2,500 bytes (median 770); small ones differ more, as they do."""
    size = np.clip(np.exp(random.normal(6.65, 0.8, POPULATION)), 200, 2_500).round()
    spread = 0.03 * (900 / size) ** 0.25
    differences = spread * SHAPES[name](random, POPULATION)
    differences -= (differences * size).sum() / size.sum()
    return Population(size, differences, 4 if name == "clusters" else 1)


def promotions(
    differences: np.ndarray, sizes: np.ndarray, looks: np.ndarray, cluster_size: int
) -> dict[str, np.ndarray]:
    """Which candidates each rule promotes: rule to bool, shape (candidates,).

    Args:
        differences, sizes: bits and bytes by cluster, shape (candidates, clusters).
        looks: shape (candidates,).
    """
    count = differences.shape[1]
    value, error, skewness = summarize(differences, sizes)
    level = spend(GATE.lifetime_error, 1) * SPENT[looks - 1]
    ours = value + reach(error, skewness, count, level)
    widened = error * t.isf(BEFORE, count - 1) * (1 + 2.5 / math.sqrt(count))
    # Taken for independent, near-copies shrink the error by the root of their number.
    plain = error * norm.isf(BEFORE) * math.sqrt((count - 1) / count / cluster_size)
    return {
        "ours": (ours < 0) & (value <= -EFFECT),
        "before": value + widened < -EFFECT,
        "weekly": value + plain < 0,
    }


SPENT = np.array([spend(1.0, look) for look in range(1, max(YEARS) + 1)]) / spend(1.0, 1)
"""Each look's level as a share of the first one's."""


def draw(
    population: Population, rows: int, clusters: int, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Differences in bits, and bytes, of independent documents: shape (rows, clusters) each."""
    chosen = random.integers(len(population.bytes), size=(rows, clusters), dtype=np.int32)
    return population.bits[chosen], population.bytes[chosen]


def retry(
    population: Population, candidates: int, clusters: int, years: int, random: np.random.Generator
) -> dict[str, float]:
    """Share of years in which some seed is promoted, by rule."""
    common, sizes = draw(population, years, clusters, random)
    ever = {rule: np.zeros(years, bool) for rule in RULES}
    for look in range(1, candidates + 1):
        own, _ = draw(population, years, clusters, random)
        bits = SHARED * common + math.sqrt(1 - SHARED**2) * own
        found = promotions(bits, sizes, np.array([look]), population.cluster_size)
        for rule in RULES:
            ever[rule] |= found[rule]
    return {rule: float(years_with.mean()) for rule, years_with in ever.items()}


def read_scores(
    population: Population,
    candidates: int,
    clusters: int,
    years: int,
    random: np.random.Generator,
    held_out_for_each: int = HELD_OUT,
) -> dict[str, float]:
    """Share of years in which joined variations are promoted, by rule."""
    held_out = held_out_for_each * clusters
    _, sizes = draw(population, years, held_out, random)
    rows = np.arange(years)[:, None]
    kept = {rule: np.zeros((years, held_out), np.float32) for rule in RULES}
    number = {rule: np.zeros(years) for rule in RULES}
    ever = {rule: np.zeros(years, bool) for rule in RULES}
    for look in range(1, candidates + 1):
        variation, _ = draw(population, years, held_out, random)
        # A stretch that begins anywhere is a draw as good as any: documents have no order.
        drawn = (random.integers(held_out, size=(years, 1)) + np.arange(clusters)) % held_out
        for rule in RULES:
            measured = (rows, drawn if rule == "ours" else np.arange(clusters)[None])
            joined = kept[rule][measured] + variation[measured]
            bits = joined / np.sqrt(number[rule] + 1)[:, None]
            found = promotions(bits, sizes[measured], np.array([look]), population.cluster_size)
            ever[rule] |= found[rule]
            better = variation[measured].sum(axis=1) < 0
            kept[rule][better] += variation[better]
            number[rule] += better
    return {rule: float(years_with.mean()) for rule, years_with in ever.items()}


def main() -> None:
    """Simulate, print a line for each case, and keep the worst lifetime errors and the power."""
    random = np.random.default_rng(0)
    populations = {"measured": measured_population(1), "mirrored": measured_population(-1)}
    populations |= {name: make_population(name, random) for name in SHAPES}
    checks: dict[str, Check] = {}
    worst = dict.fromkeys(RULES, 0.0)
    for name, population in populations.items():
        for clusters in SIZES:
            for candidates, years in YEARS.items():
                tried = retry(population, candidates, clusters, years, random)
                read = read_scores(population, candidates, clusters, years, random)
                errors = {rule: max(tried[rule], read[rule]) for rule in RULES}
                case = f"{name}_{clusters}_documents_{candidates}_candidates"
                checks[case] = at_most(errors["ours"], GATE.lifetime_error)
                worst = {rule: max(worst[rule], errors[rule]) for rule in RULES}
                told = ", ".join(f"{r} {tried[r]:.1%} and {read[r]:.1%}" for r in RULES)
                print(f"{case}: years with a false promotion (seeds, scores): {told}", flush=True)
            powers = power(population, clusters, random)
            for key, found in powers.items():
                checks[f"{name}_{clusters}_documents_{key}"] = Check(found, "reported", True)
            print(f"{name}, {clusters} documents: {powers}", flush=True)
    half = checks["measured_200_documents_ours_2x_look_1"]
    checks["twice_the_smallest_effect_at_200_documents"] = at_least(half.value, 0.5)
    share = read_scores(populations["measured"], 500, 200, 100, random, held_out_for_each=3)
    checks["a_third_measured_scores_read_500_candidates"] = Check(share["ours"], "reported", True)
    checks["weekly_bootstrap_lifetime_error"] = Check(worst["weekly"], "reported", True)
    keep(
        "gate_calibration",
        [worst["ours"]],
        [worst["before"]],
        "highest chance of a false promotion in a year",
        "each candidate judged as if it were the only one",
        "lower",
        ["numpy", "scipy"],
        checks,
    )


def power(population: Population, clusters: int, random: np.random.Generator) -> dict[str, float]:
    """How often a model that is better by a multiple of the smallest effect is promoted."""
    equal, sizes = draw(population, PAIRS, clusters, random)
    found = {}
    for times in (2, 4):
        better = equal - times * EFFECT * sizes
        for look in LOOKS:
            promoted = promotions(better, sizes, np.full(PAIRS, look), population.cluster_size)
            found[f"ours_{times}x_look_{look}"] = float(promoted["ours"].mean())
        found[f"before_{times}x"] = float(promoted["before"].mean())
    return found


if __name__ == "__main__":
    main()
