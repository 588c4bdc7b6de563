"""How sure the gate has to be, and how sure a measurement makes it.

The promise covers a pipeline's whole life: the chance that any model that is not better is ever
promoted is at most `lifetime_error`. Each judgement, called a look, spends a part of it, less and
less, so that the parts of all looks for ever sum to the whole (alpha spending: Lan & DeMets 1983;
Foster & Stine 2008). Whoever chooses the next candidate by verdicts alone learns nothing but "no"
before the first promotion, so until then the sum bounds the error for any strategy (the argument
of the Ladder: Blum & Hardt 2015). benchmarks/gate_calibration.py simulates what comes after it.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri, stdtrit

from recipes.evaluation.bootstrap import sum_by_cluster

SPENDING_SUM = 2.109742801236892
"""Of 1 / (n ln² n) over n = 2, 3, …: the parts are this series, which falls slowest among simple
ones that have a sum, so that late looks keep what power they can."""
WIDENING = 0.4
SKEW_WIDENING = 0.6
"""How far a bound is moved outwards, for the normal quantile over the root of the clusters, and
more for each unit of skewness towards large losses: the order in which skewness spoils Student's t
(Hall 1992, section 3). Found by simulation down to levels of one in 100,000."""
POWER = 0.8


@dataclass(frozen=True)
class Estimate:
    """A paired difference of losses; below zero the candidate is better."""

    difference: float
    error: float
    """Its standard error."""
    low: float
    high: float
    """Bounds that each miss the truth with the level's probability; infinite for one cluster."""
    clusters: int

    def detectable(self, smallest_effect: float) -> float:
        """The gain that a measurement like this one finds with a probability of 80 %."""
        margin = max(self.high - self.difference, smallest_effect)
        return margin + float(ndtri(POWER)) * self.error


def spend(lifetime_error: float, look: int) -> float:
    """The error that the look-th judgement of a pipeline's life may make, counted from 1."""
    number = look + 1
    return lifetime_error / (SPENDING_SUM * number * math.log(number) ** 2)


def estimate(
    differences: np.ndarray, sizes: np.ndarray, clusters: np.ndarray, level: float
) -> Estimate:
    """`sum(differences) / sum(sizes)` with bounds at a level; clusters are the independent units.

    Args:
        differences: bits of candidate minus reference, shape (documents,).
        sizes: bytes, shape (documents,); positive.
        clusters: shape (documents,); documents with one value count as one.
        level: probability with which each bound may miss, 0 to 0.5.
    """
    difference, size = sum_by_cluster(clusters, differences, sizes)
    values = summarize(difference[None], size[None])
    value, error, skewness = (float(column[0]) for column in values)
    count = len(difference)
    if count < 2:
        return Estimate(value, math.inf, -math.inf, math.inf, count)
    below = float(reach(error, -skewness, count, level))
    above = float(reach(error, skewness, count, level))
    return Estimate(value, error, value - below, value + above, count)


def summarize(differences: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Ratio of sums, its linearized standard error and its residuals' skewness, row by row.

    Args:
        differences, sizes: shape (samples, clusters).
    """
    count = differences.shape[1]
    total = sizes.sum(axis=1)
    value = differences.sum(axis=1) / total
    residuals = differences - value[:, None] * sizes
    squares = (residuals**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        error = np.sqrt(squares * count / (count - 1)) / total
        skewness = (residuals**3).mean(axis=1) / (squares / count) ** 1.5
    return value, error, np.nan_to_num(skewness)


def reach(
    error: np.ndarray | float,
    skewness: np.ndarray | float,
    clusters: int,
    level: np.ndarray | float,
) -> np.ndarray | float:
    """How far a bound at a level lies from the estimate, for a skewness towards its side."""
    widening = (WIDENING + SKEW_WIDENING * np.maximum(skewness, 0)) / math.sqrt(clusters)
    # Both are symmetric, so the quantile at 1 - level is that at level with the sign turned.
    return error * -stdtrit(clusters - 1, level) * (1 - ndtri(level) * widening)
