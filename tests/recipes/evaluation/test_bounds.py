"""What the gate's promise is made of."""

import math

import numpy as np
import pytest

from recipes.evaluation.harness import TaskScores
from recipes.evaluation.results import Data, Scores, metrics
from recipes.evaluation.settings import BITS_PER_BYTE, GateQuestion, Rounds
from recipes.evaluation.statistics import (
    FIRST_TERM,
    SPENDING_SUM,
    allowance,
    chance_of_gain,
    estimate,
    is_decided,
    level,
    reach,
    spend,
    summarize,
)


def test_all_looks_for_ever_spend_the_lifetimes_error() -> None:
    numbers = FIRST_TERM + np.arange(2_000_000)
    tail = 1 / np.log(numbers[-1] + 0.5)
    assert (1 / (numbers * np.log(numbers) ** 2)).sum() + tail == pytest.approx(SPENDING_SUM)
    assert spend(0.05, 1) == pytest.approx(0.01978, abs=1e-5)
    assert sum(spend(0.05, look) for look in range(1, 501)) < 0.05


@pytest.mark.parametrize("planned", [1, 2, 3])
def test_all_rounds_of_a_look_spend_no_more_than_the_look(planned: int) -> None:
    spent = [
        level(0.05, 7, Rounds(measured=measured, planned=planned, share=0.1))
        for measured in range(1, planned + 1)
    ]
    assert sum(spent) <= spend(0.05, 7)
    assert spent[-1] >= 0.9 * spend(0.05, 7), "the last round has most of it"


def test_bounds_widen_with_certainty_with_large_losses_and_with_what_was_read() -> None:
    random = np.random.default_rng(0)
    sizes = np.full(100, 500.0)
    even, names = random.normal(0, 10, 100), np.arange(100)
    sure = [estimate(even, sizes, names, level) for level in (0.025, 0.0001)]
    assert sure[0].high < sure[1].high and sure[0].error == sure[1].error
    losses = random.exponential(10, 100) ** 1.3
    skewed = estimate(losses, sizes, names, 0.025)
    assert skewed.high - skewed.difference > 1.1 * (skewed.difference - skewed.low)
    assert allowance(0, share=0.5) == 0, "nothing was read before the first look"
    read = estimate(even, sizes, names, 0.025, allowance(9, share=0.5))
    assert read.high - sure[0].high == pytest.approx(1.5 * read.error)


@pytest.mark.parametrize(("gain", "loss"), [(1.0, 1.0), (0.5, 1.0)])
@pytest.mark.parametrize("facts", [30, 48])
def test_right_and_wrong_answers_of_few_facts_keep_the_bounds_promise(
    facts: int, gain: float, loss: float
) -> None:
    """Most facts are answered alike; the others speak for neither model, in even or skewed ways."""
    draws = np.random.default_rng(0).random((100_000, facts))
    losses = np.where(draws < 0.3, -gain, np.where(draws < 0.3 + 0.3 * gain / loss, loss, 0.0))
    value, error, skewness = summarize(losses, np.ones_like(losses))
    at = spend(0.05, 1)
    assert (value + reach(error, skewness, facts, at) < 0).mean() <= at


@pytest.mark.parametrize("documents", [50, 100, 200])
def test_many_small_gains_with_a_few_large_losses_keep_the_bounds_promise(documents: int) -> None:
    """Their mean is zero, so whoever calls it a gain errs."""
    random, at, wrong, draws = np.random.default_rng(0), spend(0.05, 1), 0, 60_000
    for _ in range(10):
        losses = random.exponential(1.5, (draws // 10, documents)) ** 1.3
        losses += 0.4 * random.normal(size=losses.shape) - 1.5**1.3 * math.gamma(2.3)
        value, error, skewness = summarize(losses, np.ones_like(losses))
        wrong += int((value + reach(error, skewness, documents, at) < 0).sum())
    assert wrong / draws <= at


@pytest.mark.parametrize(
    ("gain", "noise", "decided"),
    [
        (0.1, 0.05, True),
        (0.0, 0.005, True),
        (-0.1, 0.05, True),
        (0.02, 0.05, False),
        (0.01, 0.05, False),
        (-0.01, 0.05, True),
        (np.nan, 0.05, True),
    ],
)
def test_measuring_ends_when_a_gain_is_sure_or_none_is_likely(
    gain: float, noise: float, decided: bool
) -> None:
    random = np.random.default_rng(0)
    sizes = np.full(50, 500.0)
    differences = (random.normal(0, noise, 50) - gain) * sizes
    question = GateQuestion(look=1, readable=0, lifetime_error=0.05, smallest_effect=0.005)
    rounds = Rounds(measured=1, planned=3, share=0.1)
    assert is_decided(differences, sizes, np.arange(50), question, rounds, 200) is decided


def test_a_gain_is_as_likely_as_it_was_said_to_be() -> None:
    """What 50 of 200 documents say of the rest is right as often as it says, for any true gain."""
    random = np.random.default_rng(0)
    gains = random.uniform(-0.1, 0.1, (40_000, 1))
    losses, sizes = random.normal(0, 0.05, (40_000, 200)) - gains, np.ones((40_000, 200))
    value, error, skewness = summarize(losses[:, :50], sizes[:, :50])
    said = chance_of_gain(value, error, skewness, 50, 200, 0.005, 0.0, 0.005)
    value, error, skewness = summarize(losses, sizes)
    found = (value + reach(error, skewness, 200, 0.005) < 0) & (value <= -0.005)
    for low, high in ((0.01, 0.1), (0.1, 0.5), (0.5, 0.9), (0.9, 0.99)):
        asked = (said >= low) & (said < high)
        assert found[asked].mean() == pytest.approx(said[asked].mean(), abs=0.05)


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [
        (0, 40, 0.0, 1 - 0.025 ** (1 / 40)),
        (40, 40, 0.025 ** (1 / 40), 1.0),
        (1, 1, 0.025, 1.0),
        (39, 40, None, 1.0),
        (1, 40, 0.0, None),
        (20, 40, None, None),
    ],
)
def test_the_interval_of_a_share_of_right_answers_is_one_of_shares(
    right: int, of: int, low: float | None, high: float | None
) -> None:
    values = np.repeat([1.0, 0.0], [right, of - right])
    # Asked in two forms each, which are answered alike.
    names = [str(number) for number in range(of) for _ in range(2)]
    answers = TaskScores("exam", "acc", names, names, np.repeat(values, 2), [None] * 2 * of)
    nothing = Data({}, [], [], [], BITS_PER_BYTE, "fingerprint")
    found = metrics(nothing, {"candidate": Scores({}, [], [answers])})["exam_acc"]["candidate"]
    value, below, above = (float(found[name] or 0.0) for name in ("value", "low", "high"))
    assert value == right / of
    assert below == (pytest.approx(low) if low is not None else below)
    assert above == (pytest.approx(high) if high is not None else above)
    assert 0 <= below <= value <= above <= 1 and below < above


def test_near_copies_are_one_document_and_one_document_bounds_nothing() -> None:
    found = estimate(np.ones(4), np.full(4, 100.0), np.zeros(4), 0.025)
    assert found.clusters == 1 and found.high == np.inf
