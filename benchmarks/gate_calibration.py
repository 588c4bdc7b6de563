"""How often a pipeline ever promotes a model that is not better, and how often one that is.

A year is a sequence of candidates none of which is better than the champion in truth: each one's
true difference is 0. Nobody knows beforehand which shape the per-document differences of two models
have, so there are seven: those measured between SmolLM2-135M and itself after 32 steps on package
documentation (447 held-out documents, in gate_calibration_measured.csv) and their mirror image; and
made-up ones: even, mostly small gains with a few large ones, mostly small losses with a few large
ones, large losses of one document in twenty, and in clusters of near-copies.

Two searchers try for a year. One retries with other seeds; half of the variance of its candidates'
differences is common to all of them. The other one reads the scores: its next candidate joins all
variations that it tried, weighted by their scores, which no other use of the scores beats here
(sharper than the boosting of Blum & Hardt 2015, section 4).

Three rules face them. The gate measures each candidate on documents drawn for it from the held-out
text, in rounds, and allows for scores that were read. The rule before it measured all on the same
documents and decided on each as if it were the only one (2.5% against the smallest effect, by a
widened Student's t). The third is a plain percentile bootstrap used week by week on the same
documents, resolved by its normal limit.

With the path of an evaluation's `scores.parquet` it says instead what the gate finds at the noise
between that candidate and that incumbent.
"""

import math
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from scipy.stats import norm, t

from benchmarks.gate_populations import SHAPES, Population, load_measured, make, measured
from benchmarks.harness import Check, at_least, at_most, record
from llm_assets.gate.verdict import GateSettings
from recipes.evaluation.settings import Rounds
from recipes.evaluation.statistics import (
    FUTILITY,
    allowance,
    chance_of_gain,
    level,
    reach,
    summarize,
)

YEARS = {52: 1_000, 500: 200}
"""Candidates of a year to years simulated."""
ROUNDS = {36: (36,), 200: (50, 100, 200), 1_000: (250, 500, 1_000)}
"""Documents of the whole budget to those measured after each round."""
SEARCHED = (36, 200)
SHARES = (1 / 12, 1 / 3)
"""Of the held-out documents, how many a candidate is measured on at most."""
PAIRS = 4_000
GATE = GateSettings()
EFFECT = GATE.smallest_effect
BEFORE = 0.025
SHARED = math.sqrt(0.5)
"""Of two candidates' differences, the root of the variance that they have in common."""
LOOKS = (1, 10, 52)
POWER_OF = ("measured", "half_the_noise", "few_large_losses", "clusters")

RULES = ("ours", "before", "weekly")


def judge(
    rule: str,
    differences: np.ndarray,
    sizes: np.ndarray,
    look: int,
    share: float,
    cluster_size: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Which candidates a rule promotes (bool), and after how many documents: (candidates,) each.

    Args:
        differences, sizes: bits and bytes by cluster, shape (candidates, clusters).
    """
    count = differences.shape[1]
    if rule == "ours":
        return _judge_in_rounds(differences, sizes, look, share)
    value, error, _ = summarize(differences, sizes)
    if rule == "before":
        promoted = value + error * t.isf(BEFORE, count - 1) * (1 + 2.5 / math.sqrt(count)) < -EFFECT
    else:
        # Taken for independent, near-copies shrink the error by the root of their number.
        plain = error * norm.isf(BEFORE) * math.sqrt((count - 1) / count / cluster_size)
        promoted = value + plain < 0
    return promoted, np.full(len(value), count)


def _judge_in_rounds(
    differences: np.ndarray, sizes: np.ndarray, look: int, share: float
) -> tuple[np.ndarray, np.ndarray]:
    """As `statistics.is_decided` and the gate do, for many candidates at once."""
    ends = ROUNDS[differences.shape[1]]
    promoted = np.zeros(len(differences), bool)
    documents = np.zeros(len(differences), int)
    open_ = np.arange(len(differences))
    for number, end in enumerate(ends, 1):
        value, error, skewness = summarize(differences[open_, :end], sizes[open_, :end])
        rounds = Rounds(measured=number, planned=len(ends), share=share)
        at = level(GATE.lifetime_error, look, rounds)
        allowed = allowance(look - 1, share)
        above = reach(error, skewness, end, at) + allowed * error
        gained = (value + above < 0) & (value <= -EFFECT)
        promoted[open_[gained]] = True
        documents[open_] = end
        if end < ends[-1]:
            last = level(
                GATE.lifetime_error, look, rounds.model_copy(update={"measured": len(ends)})
            )
            figures = (value, error, skewness, end, ends[-1], last, allowed)
            open_ = open_[~gained & (chance_of_gain(*figures, EFFECT) >= FUTILITY)]
    return promoted, documents


def retry(
    population: Population, candidates: int, clusters: int, years: int, random: np.random.Generator
) -> dict[str, float]:
    """Share of years in which some seed is promoted, by rule."""
    common, sizes = population.draw(years, clusters, random)
    ever = {rule: np.zeros(years, bool) for rule in RULES}
    for look in range(1, candidates + 1):
        own, _ = population.draw(years, clusters, random)
        bits = SHARED * common + math.sqrt(1 - SHARED**2) * own
        for rule in RULES:
            ever[rule] |= judge(rule, bits, sizes, look, 0.0, population.cluster_size)[0]
    return {rule: float(years_with.mean()) for rule, years_with in ever.items()}


def read_scores(
    rule: str,
    population: Population,
    candidates: int,
    clusters: int,
    years: int,
    share: float,
    random: np.random.Generator,
) -> float:
    """Share of years in which joined variations are promoted."""
    held_out = round(clusters / share) if rule == "ours" else clusters
    bits, sizes = population.draw(years, held_out, random)
    rows, spread = np.arange(years)[:, None], math.sqrt((population.bits**2).mean())
    joined, weight = np.zeros((years, held_out)), np.zeros(years)
    ever = np.zeros(years, bool)
    for look in range(1, candidates + 1):
        bits, _ = population.draw(years, held_out, random)
        # A stretch that begins anywhere is a draw as good as any: documents have no order.
        start = random.integers(held_out, size=(years, 1)) if rule == "ours" else 0
        drawn = (rows, (start + np.arange(clusters)) % held_out)
        candidate = (joined[drawn] + bits[drawn]) / np.sqrt(weight + 1)[:, None]
        promoted, documents = judge(
            rule, candidate, sizes[drawn], look, share, population.cluster_size
        )
        ever |= promoted
        seen = np.where(np.arange(clusters) < documents[:, None], bits[drawn], 0)
        score = -seen.sum(axis=1) / np.sqrt(documents) / spread
        joined += score[:, None] * bits
        weight += score**2
    return float(ever.mean())


def power(population: Population, clusters: int, random: np.random.Generator) -> dict[str, float]:
    """How often a model better by a multiple of the smallest effect is promoted, and how soon."""
    equal, sizes = population.draw(PAIRS, clusters, random)
    found = {}
    for times in (2, 4):
        better = equal - times * EFFECT * sizes
        for look in LOOKS:
            # A pipeline's own procedure, settled before any score could be read.
            promoted, documents = judge("ours", better, sizes, look, 0.0, 1)
            found[f"{times}x_look_{look}"] = float(promoted.mean())
            found[f"{times}x_look_{look}_documents"] = float(documents.mean())
        for rule in ("before", "weekly"):
            promoted, _ = judge(rule, better, sizes, 1, 0.0, population.cluster_size)
            found[f"{times}x_{rule}"] = float(promoted.mean())
    return found


def mixed_year(
    population: Population, clusters: int, years: int, random: np.random.Generator
) -> dict[str, dict[str, float]]:
    """A year of 52 candidates, a quarter better by twice the smallest effect, half worse by it.

    Returns:
        By rule: share of better candidates `found`, of years with a `wrong` promotion, of years in
        which the champion ever `fell` below the first one, and the median share of `documents`
        that a verdict took.
    """
    truths = EFFECT * random.choice([-2.0, 0.0, 1.0, 1.0], size=(52, years))
    champion = {rule: np.zeros(years) for rule in RULES}
    found = dict.fromkeys(RULES, 0)
    wrong, fell = ({rule: np.zeros(years, bool) for rule in RULES} for _ in range(2))
    looks = np.ones(years, int)
    taken: dict[str, list[np.ndarray]] = {rule: [] for rule in RULES}
    for truth in truths:
        equal, sizes = population.draw(years, clusters, random)
        bits = equal + truth[:, None] * sizes
        for rule in RULES:
            promoted, documents = np.zeros(years, bool), np.zeros(years, int)
            for look in np.unique(looks):
                at = looks == look
                promoted[at], documents[at] = judge(
                    rule, bits[at], sizes[at], int(look), 0.0, population.cluster_size
                )
            champion[rule] += np.where(promoted, truth, 0)
            found[rule] += int((promoted & (truth < 0)).sum())
            wrong[rule] |= promoted & (truth >= 0)
            fell[rule] |= champion[rule] > 0
            taken[rule].append(documents)
            if rule == "ours":
                spent = ~promoted
        looks += spent
    better = int((truths < 0).sum())
    return {
        rule: {
            "found": found[rule] / better,
            "wrong": float(wrong[rule].mean()),
            "fell": float(fell[rule].mean()),
            "documents": float(np.median(taken[rule])) / clusters,
        }
        for rule in RULES
    }


def search(population: Population, random: np.random.Generator) -> dict[str, dict[str, float]]:
    """The highest chance of a false promotion in a year, by rule and searcher."""
    worst = {rule: {"seeds": 0.0, "scores": 0.0} for rule in RULES}
    for clusters in SEARCHED:
        for candidates, years in YEARS.items():
            tried = retry(population, candidates, clusters, years, random)
            for rule in RULES:
                shares = SHARES if rule == "ours" else (1.0,)
                read = [
                    read_scores(rule, population, candidates, clusters, years, share, random)
                    for share in shares
                ]
                found = worst[rule]
                found["seeds"] = max(found["seeds"], tried[rule])
                found["scores"] = max(found["scores"], *read)
    return worst


SEARCHERS = {"seeds": "retrying seeds", "scores": "reading scores"}
"""What those do, in words, who submit the candidates."""
MIXED_YEAR = {
    "found": "better candidates found",
    "wrong": "years with a false promotion",
    "fell": "years in which the champion fell below the first one",
    "documents": "median share of the documents that a verdict used",
}
"""What the figures of `mixed_year` are, in words."""


def main() -> None:
    """Simulate, print a line for each case, and record the worst lifetime errors and the power."""
    random = np.random.default_rng(0)
    populations = {
        "measured": load_measured(1),
        "mirrored": load_measured(-1),
        "half_the_noise": load_measured(0.5),
    } | {name: make(name, random) for name in SHAPES}
    checks: dict[str, Check] = {}
    worst = dict.fromkeys(RULES, 0.0)
    for name in ("measured", "mirrored", *SHAPES):
        for rule, by_searcher in search(populations[name], random).items():
            for searcher, found in by_searcher.items():
                worst[rule] = max(worst[rule], found)
                if rule == "ours":
                    checks[f"false promotion in a year: {name}, {SEARCHERS[searcher]}"] = at_most(
                        found, GATE.lifetime_error
                    )
                print(f"{name}, {rule}, {searcher}: {found:.1%} of years", flush=True)
    for name in POWER_OF:
        for clusters in (200, 1_000):
            for key, value in power(populations[name], clusters, random).items():
                checks[f"power: {name}, {clusters} documents, {key}"] = Check(
                    value, "reported", True
                )
    for name in ("measured", "half_the_noise"):
        for rule, figures in mixed_year(populations[name], 200, 400, random).items():
            limits = {"wrong": GATE.lifetime_error, "fell": GATE.lifetime_error, "documents": 0.5}
            for key, value in figures.items():
                checks[f"mixed year, {name}, {rule}: {MIXED_YEAR[key]}"] = (
                    at_most(value, limits[key])
                    if rule == "ours" and key in limits
                    else Check(value, "reported", True)
                )
    for name in ("measured", "half_the_noise"):
        value = checks[f"power: {name}, 200 documents, 2x_look_1"].value
        checks[f"power for twice the smallest effect, 200 documents: {name}"] = at_least(value, 0.4)
    checks["false promotion in a year: weekly bootstrap, worst"] = Check(
        worst["weekly"], "reported", True
    )
    record(
        "gate_calibration",
        [worst["ours"]],
        [worst["before"]],
        "highest chance of a false promotion in a year",
        "each candidate judged as if it were the only one",
        "lower",
        ["numpy", "scipy"],
        checks,
    )


def power_of(scores: Path) -> None:
    """Print the power at the noise between the two models of an evaluation."""
    rows = pq.read_table(scores, filters=[("task", "=", "held_out")])
    columns = ("size", "score_candidate", "score_incumbent")
    sizes, candidate, incumbent = (np.asarray(rows[name]) for name in columns)
    population = measured(sizes, (candidate - incumbent) / sizes)
    for clusters in ROUNDS:
        print(clusters, "documents:", power(population, clusters, np.random.default_rng(0)))


if __name__ == "__main__":
    power_of(Path(sys.argv[1])) if sys.argv[1:] else main()
