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


FAILING, WARM_UP = TrafficSample(answered=9, failed=1), SETTINGS.warm_up
NOTHING: dict[str, list[tuple[TrafficSample, TrafficSample, float]]] = {
    "both fail alike": [(FAILING, FAILING, 0.5)] * 100,
    "one failed request": [(TrafficSample(answered=3, failed=1), TrafficSample(answered=40), 0.1)],
    # A token of a fuller batch takes longer, and an engine seldom asked finds its caches cold.
    "a little slower with another share": [(took(1.5), took(1.0), 0.1)] * (WARM_UP + LOOKS),
    "one slow moment": [
        (took(9.0 if 100 <= look < 200 else 1.0), took(1.0), 0.5) for look in range(LOOKS)
    ],
    "cold caches at first": [(took(9.0), took(1.0), 0.5)] * WARM_UP
    + [(took(1.0), took(1.0), 0.5)] * LOOKS,
    "bits within the limit": [(TrafficSample(deviations=[0.4]), TrafficSample(), 0.5)] * 20,
}
"""What was seen of the new version, of the old one, and the share."""


@pytest.mark.parametrize("looks", NOTHING.values(), ids=NOTHING)
def test_what_says_nothing_about_a_version_is_not_held_against_it(
    looks: list[tuple[TrafficSample, TrafficSample, float]],
) -> None:
    evidence = Evidence(SETTINGS)
    for look in looks:
        evidence.add(*look)
    assert evidence.against is None


@pytest.mark.parametrize(
    ("new", "told"),
    [
        (took(9.0), "slower"),
        (TrafficSample(deviations=[3.0]), "its bits differ from the evaluation's"),
    ],
)
def test_a_large_difference_is_seen_with_any_share(new: TrafficSample, told: str) -> None:
    evidence = Evidence(SETTINGS)
    for _ in range(WARM_UP + LOOKS):
        evidence.add(new, took(1.0), 0.1)
    assert told in str(evidence.against)
