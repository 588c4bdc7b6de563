"""What may be concluded from the requests of a rollout."""

import itertools
import math
import random
from typing import Any

import pytest

from serving.rollout import Bets, Evidence, TrafficSample
from serving.settings import RolloutSettings

SETTINGS = RolloutSettings()
LOOKS = 500


def watch(
    *, slow: float = 1.0, slow_share: float = 1.0, failing: float = 0.0, seed: int = 0
) -> str | None:
    """What speaks against a version after up to 500 looks at two requests of each side."""
    evidence, draw = Evidence(SETTINGS), random.Random(seed)

    def look(times: float, failing: float) -> TrafficSample:
        failed = sum(draw.random() < failing for _ in range(2))
        seconds = [draw.lognormvariate(0, 0.25) for _ in range(2 - failed)]
        return TrafficSample(
            answered=2 - failed,
            failed=failed,
            seconds=[one * (times if draw.random() < slow_share else 1) for one in seconds],
        )

    for _ in range(LOOKS):
        evidence.add(look(slow, failing), look(1.0, 0.0), 0.5)
        if evidence.against:
            break
    return evidence.against


def took(seconds: float) -> TrafficSample:
    """One answer."""
    return TrafficSample(answered=1, seconds=[seconds])


@pytest.mark.parametrize("mean", [0.1, 0.5])
def test_a_fair_game_keeps_its_capital_in_expectation(mean: float) -> None:
    """Of all sequences of eight numbers, by their probabilities: what Ville's inequality needs."""
    expected = 0.0
    for values in itertools.product((0.0, 1.0), repeat=8):
        bets = Bets()
        for value in values:
            bets.add(value, mean)
        chance = math.prod(mean if value else 1 - mean for value in values)
        expected += chance * math.exp(bets.logarithm)
    assert expected == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(10))
def test_equal_versions_have_nothing_against_them(seed: int) -> None:
    assert watch(seed=seed) is None


@pytest.mark.parametrize(
    ("worse", "told"),
    [
        ({"slow": 1.2}, "slower than the version before: it takes 1."),
        # The median hides it.
        ({"slow": 4.0, "slow_share": 0.2}, "slower than the version before"),
        ({"failing": 0.02}, "requests failed on it, and 0 of"),
    ],
    ids=["a fifth slower", "one slow answer in five", "two failures in a hundred"],
)
def test_a_worse_version_is_seen(worse: dict[str, Any], told: str) -> None:
    assert told in str(watch(**worse))


def test_failures_that_both_versions_have_are_not_the_new_ones() -> None:
    evidence = Evidence(SETTINGS)
    for _ in range(100):
        evidence.add(TrafficSample(answered=9, failed=1), TrafficSample(answered=9, failed=1), 0.5)
    assert evidence.against is None


def test_one_failed_request_is_too_few_to_decide_by() -> None:
    evidence = Evidence(SETTINGS)
    evidence.add(TrafficSample(answered=3, failed=1), TrafficSample(answered=40), 0.1)
    assert evidence.against is None


def test_of_unequal_shares_only_a_large_slowdown_is_seen() -> None:
    """A token of a fuller batch takes longer, and an engine seldom asked finds its caches cold."""
    little, much = Evidence(SETTINGS), Evidence(SETTINGS)
    for _ in range(SETTINGS.warm_up + LOOKS):
        little.add(took(1.5), took(1.0), 0.1)
        much.add(took(9.0), took(1.0), 0.1)
    assert little.against is None
    assert "slower" in str(much.against)


def test_a_moment_in_which_one_engine_is_slow_counts_once() -> None:
    evidence = Evidence(SETTINGS)
    for look in range(LOOKS):
        slow = 9.0 if 100 <= look < 200 else 1.0
        evidence.add(took(slow), took(1.0), 0.5)
    assert evidence.against is None


def test_cold_caches_of_the_first_answers_do_not_count() -> None:
    evidence = Evidence(SETTINGS)
    for _ in range(SETTINGS.warm_up):
        evidence.add(took(9.0), took(1.0), 0.5)
    for _ in range(LOOKS):
        evidence.add(took(1.0), took(1.0), 0.5)
    assert evidence.against is None


def test_other_bits_than_the_evaluations_are_seen() -> None:
    evidence = Evidence(SETTINGS)
    for _ in range(20):
        evidence.add(TrafficSample(deviations=[0.4]), TrafficSample(), 0.5)
    assert evidence.against is None
    for _ in range(40):
        evidence.add(TrafficSample(deviations=[3.0]), TrafficSample(), 0.5)
    assert "its bits differ from the evaluation's" in str(evidence.against)
