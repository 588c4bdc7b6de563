"""Confidence intervals for a ratio of sums over documents whose near-copies are not independent."""

from dataclasses import dataclass

import numpy as np

WIDENING = 2.5
_CHUNK_DRAWS = 4_000_000


@dataclass(frozen=True)
class Interval:
    """A value and the bounds between which it lies with the stated confidence."""

    value: float
    low: float
    high: float


def sum_by_cluster(clusters: np.ndarray, *columns: np.ndarray) -> list[np.ndarray]:
    """Sum each column over the documents of a cluster: arrays of shape (distinct clusters,)."""
    _, groups = np.unique(clusters, return_inverse=True)
    return [np.bincount(groups, weights=column) for column in columns]


def studentized_interval(
    numerators: np.ndarray,
    denominators: np.ndarray,
    clusters: np.ndarray,
    *,
    confidence: float = 0.95,
    resamples: int,
    seed: int,
) -> Interval:
    """The bootstrap-t interval of `sum(numerators) / sum(denominators)`, clusters resampled.

    Each resample's distance from the estimate is divided by that resample's own standard error
    (linearised, as for any ratio estimator), which keeps the stated confidence on few and skewed
    documents where a percentile interval does not (Efron, 1981; Hall, 1988). A normal-theory
    interval with Student's t is computed besides, and each bound is the farther of the two: with
    few clusters the bootstrap cannot see a tail that it has not drawn. For the same reason both
    bounds are moved outwards by the factor `1 + 2.5 / sqrt(clusters)`, the order in which skewness
    fades: strongly skewed differences need it to keep 2.5 % a side from 30 clusters on
    (benchmarks/gate_calibration.py).

    Args:
        numerators, denominators: shape (documents,); denominators are positive.
        clusters: shape (documents,); documents with one value are resampled together.

    Returns:
        Bounds are minus and plus infinity for fewer than two clusters.
    """
    numerator, denominator = sum_by_cluster(clusters, numerators, denominators)
    count = len(numerator)
    value = float(numerator.sum() / denominator.sum())
    if count < 2:
        return Interval(value, -np.inf, np.inf)
    unweighted = _moments(np.ones((1, count)), numerator, denominator)
    error = float(_ratio(unweighted, count)[1][0])
    if error == 0:
        return Interval(value, value, value)
    values, errors = _resample(numerator, denominator, resamples, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        distances = np.where(
            errors > 0, (values - value) / errors, np.sign(values - value) * np.inf
        )
    tail = (1 - confidence) / 2
    low, high = np.quantile(distances, [tail, 1 - tail], method="inverted_cdf")
    student = _student_quantile(1 - tail, count - 1)
    reach = error * (1 + WIDENING / np.sqrt(count))
    return Interval(value, value - max(high, student) * reach, value + max(-low, student) * reach)


def _resample(
    numerator: np.ndarray, denominator: np.ndarray, resamples: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ratio and standard error of every resample: two arrays of shape (resamples,)."""
    generator = np.random.default_rng(seed)
    count = len(numerator)
    rows = max(1, _CHUNK_DRAWS // count)
    values, errors = [], []
    for first in range(0, resamples, rows):
        size = min(rows, resamples - first)
        draws = generator.integers(count, size=(size, count)) + np.arange(size)[:, None] * count
        weights = np.bincount(draws.ravel(), minlength=size * count).reshape(size, count)
        value, error = _ratio(_moments(weights.astype(float), numerator, denominator), count)
        values.append(value)
        errors.append(error)
    return np.concatenate(values), np.concatenate(errors)


def _moments(weights: np.ndarray, numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Weighted sums of n, d, n², nd, d²: shape (5, resamples)."""
    columns = np.stack(
        [numerator, denominator, numerator**2, numerator * denominator, denominator**2], axis=1
    )
    return (weights @ columns).T


def _ratio(moments: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ratio of sums and its linearised standard error: two arrays of shape (resamples,)."""
    n, d, nn, nd, dd = moments
    value = n / d
    squares = np.maximum(nn - 2 * value * nd + value**2 * dd, 0)
    return value, np.sqrt(squares * count / (count - 1)) / d


def _student_quantile(probability: float, degrees: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(degrees, probability))
