"""What the gate's promise is made of."""

import numpy as np
import pytest

from llm_assets.gate.bounds import SPENDING_SUM, estimate, spend


def test_all_looks_for_ever_spend_the_lifetimes_error() -> None:
    numbers = np.arange(2, 2_000_000)
    tail = 1 / np.log(numbers[-1] + 0.5)
    assert (1 / (numbers * np.log(numbers) ** 2)).sum() + tail == pytest.approx(SPENDING_SUM)
    assert spend(0.05, 1) == pytest.approx(0.0247, abs=1e-4)
    assert sum(spend(0.05, look) for look in range(1, 501)) < 0.05


def test_bounds_widen_with_certainty_and_with_large_losses_seen() -> None:
    random = np.random.default_rng(0)
    sizes = np.full(100, 500.0)
    even, names = random.normal(0, 10, 100), np.arange(100)
    sure = [estimate(even, sizes, names, level) for level in (0.025, 0.0001)]
    assert sure[0].high < sure[1].high and sure[0].error == sure[1].error
    losses = random.exponential(10, 100) ** 1.3
    skewed = estimate(losses, sizes, names, 0.025)
    assert skewed.high - skewed.difference > 1.1 * (skewed.difference - skewed.low)


def test_near_copies_are_one_document_and_one_document_bounds_nothing() -> None:
    found = estimate(np.ones(4), np.full(4, 100.0), np.zeros(4), 0.025)
    assert found.clusters == 1 and found.high == np.inf
