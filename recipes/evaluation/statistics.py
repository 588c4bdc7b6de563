"""How sure the gate has to be, and how sure a measurement makes it.

The promise covers a pipeline's whole life: the chance that any model that is not better is ever
promoted is at most `lifetime_error`. Each judgement, called a look, spends a part of it, less and
less, so that the parts of all looks for ever sum to the whole (alpha spending: Lan & DeMets 1983;
Foster & Stine 2008). A look that promotes spends nothing: until the first wrong promotion all of
them were right, so the n-th model that is not better comes after n - 1 at least that were not
promoted, and may err with the n-th part at most (what a rejected hypothesis gives back: Tian &
Ramdas 2021). Whoever chooses the next candidate by verdicts alone learns nothing but "no" between
two promotions, so there the sum bounds the error for any strategy (the argument of the Ladder: Blum
& Hardt 2015). Within a look, documents are measured in rounds until the verdict
is known; each round spends a part of the look's part, so measuring may end after any of them.

Who reads the scores of earlier candidates learns also about the documents that the next one is
measured on, where they are the same. Scores of k candidates, each on a share of the held-out text
drawn for it, can lift the next one's by at most about share times root k standard errors (reached
by adding up variations weighted by their scores; the rate of Dwork and others 2015 and of Steinke &
Ullman 2015), so the bound moves by as much. Only a choice can carry what was read: where the
procedure that makes candidates was settled before a score could be read, nothing moves, however
often it runs on text that arrives. benchmarks/gate_calibration.py simulates all of it.
"""

import math
from dataclasses import dataclass

import numpy as np

from recipes.evaluation.settings import GateQuestion, Rounds

INTERVAL_TAIL = 0.025
"""On either side of a figure's 95% interval."""


@dataclass(frozen=True)
class Interval:
    """A figure and its 95% interval, where it has one."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def figures(self) -> dict[str, float | None]:
        """The fields; None stands for what is not finite, which JSON cannot say."""
        return {name: value if math.isfinite(value) else None for name, value in vars(self).items()}


FIRST_TERM = 2.3
SPENDING_SUM = 1.5844867764
"""Of 1 / (n ln² n) over n = 2.3, 3.3, …: the parts are this series, which falls slowest among
simple ones that have a sum. Where it begins weighs the first looks against later ones
(docs/promotion.md has what a later beginning finds)."""
LAST_ROUND = 0.9
"""What of a look's part its last round spends; each one before it a tenth of the next one's, as
measuring ends early mostly because a gain has become unlikely, which spends nothing."""
BOUND_WIDENING = 3.0
"""How far a bound is moved outwards, for the square of the normal quantile over the number of
clusters; besides for the quantile times the skewness towards large losses over the root of that
number, the two orders in which the shape of the differences spoils Student's t (Hall 1992, section
3). Found by simulating differences that are mostly small gains with a few large losses, down to 30
clusters and levels of one in 100,000."""
FUTILITY = 0.05
"""A gain that is less likely than this is not waited for (`is_decided`)."""
POWER = 0.8


@dataclass(frozen=True)
class PairedEstimate:
    """A paired difference of losses; below zero the candidate is better."""

    difference: float
    error: float
    """Its standard error."""
    low: float
    high: float
    """Bounds that each miss the truth with at most the level's probability; infinite for one
    cluster."""
    clusters: int
    skewness: float = 0.0
    """Of the differences; above zero for a few large losses."""

    def detectable(self, smallest_effect: float) -> float:
        """The gain that a measurement like this one finds with a probability of 80%."""
        from scipy.special import ndtri

        margin = max(self.high - self.difference, smallest_effect)
        return margin + float(ndtri(POWER)) * self.error


def spend(lifetime_error: float, look: int) -> float:
    """The error that a comparison may make, by its number (`GateQuestion.look`)."""
    number = look + FIRST_TERM - 1
    return lifetime_error / (SPENDING_SUM * number * math.log(number) ** 2)


def level(lifetime_error: float, look: int, rounds: Rounds) -> float:
    """The part of a look's error that the round measured last may spend."""
    part = 1.0 if rounds.planned == 1 else LAST_ROUND / 10 ** (rounds.planned - rounds.measured)
    return part * spend(lifetime_error, look)


def allowance(readable: int, share: float) -> float:
    """By how many standard errors this look may have been lifted by somebody who read the scores of
    earlier looks before choosing this procedure; the share is the largest part of the held-out
    documents that a candidate is measured on."""
    return share * math.sqrt(readable)


def is_decided(
    differences: np.ndarray,
    sizes: np.ndarray,
    clusters: np.ndarray,
    question: GateQuestion,
    rounds: Rounds,
    planned: int,
) -> bool:
    """Whether the verdict is known: a gain is sure, or unlikely (5%) to become so with all clusters
    planned.

    Giving up costs power, never the error. Figures that are not finite decide, too.
    """
    if not np.isfinite(differences).all():
        return True
    allowed = allowance(question.readable, rounds.share)
    at = level(question.lifetime_error, question.look, rounds)
    paired = estimate(differences, sizes, clusters, at, allowed)
    # The candidate is better for sure, and by enough as measured.
    if paired.high < 0 and paired.difference <= -question.smallest_effect:
        return True
    # A single cluster gives no standard error yet.
    if not math.isfinite(paired.error):
        return False
    last_round = rounds.model_copy(update={"measured": rounds.planned})
    at = level(question.lifetime_error, question.look, last_round)
    figures = (paired.difference, paired.error, paired.skewness, paired.clusters)
    return bool(chance_of_gain(*figures, planned, at, allowed, question.smallest_effect) < FUTILITY)


def chance_of_gain(
    difference: np.ndarray | float,
    error: np.ndarray | float,
    skewness: np.ndarray | float,
    clusters: int,
    planned: int,
    level: float,
    allowed: float,
    smallest_effect: float,
) -> np.ndarray | float:
    """The probability that all planned clusters will show a gain, from those measured so far.

    Predictive power with a flat prior (Spiegelhalter, Freedman & Blackburn 1986): what is still to
    be measured scatters about what was, by the errors of both.

    Args:
        difference, error, skewness: as measured, see `summarize`.
        clusters, planned: measured so far, and in the end.
        level: of the last round's bound.
    """
    from scipy.special import ndtr

    # Standard errors shrink with the root of the number of clusters.
    final = error * math.sqrt(clusters / planned)
    margin = np.maximum(reach(final, skewness, planned, level) + allowed * final, smallest_effect)
    with np.errstate(divide="ignore", invalid="ignore"):
        return ndtr((-margin - difference) / np.sqrt(error**2 - final**2))


def estimate(
    differences: np.ndarray,
    sizes: np.ndarray,
    clusters: np.ndarray,
    level: float,
    allowed: float = 0.0,
) -> PairedEstimate:
    """`sum(differences) / sum(sizes)` with bounds at a level; clusters are the independent units.

    Args:
        differences: bits of candidate minus reference, shape (documents,).
        sizes: bytes, shape (documents,); positive.
        clusters: shape (documents,); documents with one value count as one.
        level: probability with which each bound may miss, 0 to 0.5.
        allowed: standard errors that both bounds lie farther out, see `allowance`.
    """
    _, groups = np.unique(clusters, return_inverse=True)
    difference, size = (np.bincount(groups, weights=column) for column in (differences, sizes))
    values = summarize(difference[None], size[None])
    value, error, skewness = (float(column[0]) for column in values)
    count = len(difference)
    if count < 2:
        return PairedEstimate(value, math.inf, -math.inf, math.inf, count)
    # Each bound moves out for a skewness towards its own side alone.
    below = float(reach(error, -skewness, count, level)) + allowed * error
    above = float(reach(error, skewness, count, level)) + allowed * error
    return PairedEstimate(value, error, value - below, value + above, count, skewness)


def summarize(differences: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, ...]:
    """Ratio of sums, its linearized standard error and its residuals' skewness, row by row of
    arrays of the shape (samples, clusters)."""
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
    # Imported here, since whoever loads Dagster's definitions would wait for it.
    from scipy.special import ndtri, stdtrit

    # Both are symmetric, so the quantile at 1 - level is that at level with the sign turned.
    quantile = -ndtri(level)
    by_skewness = quantile * np.maximum(skewness, 0) / math.sqrt(clusters)
    by_tails = BOUND_WIDENING * quantile**2 / clusters
    return error * -stdtrit(clusters - 1, level) * (1 + by_skewness + by_tails)


def mean_interval(scores: np.ndarray, clusters: np.ndarray) -> Interval:
    """The 95% interval of a mean; of right and wrong answers, scored 1 and 0, within 0 and 1.

    Where all are right or all are wrong, nothing scatters, so the bound is that of Clopper and
    Pearson: the share by which so many are alike by chance in one case of forty.
    """
    figure = interval(scores, np.ones(len(scores)), clusters)
    if not np.isin(scores, (0.0, 1.0)).all():
        return figure
    low, high = max(0.0, figure.low), min(1.0, figure.high)
    alike = INTERVAL_TAIL ** (1 / len(np.unique(clusters)))
    if figure.value in (0.0, 1.0):
        low, high = (alike, 1.0) if figure.value else (0.0, 1 - alike)
    return Interval(figure.value, low, high)


def interval(scores: np.ndarray, sizes: np.ndarray, clusters: np.ndarray) -> Interval:
    """The 95% interval of `sum(scores) / sum(sizes)`, as `estimate` bounds it."""
    paired = estimate(scores, sizes, clusters, INTERVAL_TAIL)
    return Interval(paired.difference, paired.low, paired.high)
