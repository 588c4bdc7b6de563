"""Waiting for what other processes do."""

import time
from collections.abc import Callable

WAIT_SECONDS = 240.0
"""Far more than anything waited for takes beside all that a busy machine does."""


def wait_until(
    condition: Callable[[], object],
    seconds: float = WAIT_SECONDS,
    poll_seconds: float = 0.05,
    told: Callable[[], str] = lambda: "waited in vain",
) -> None:
    """Return once a condition holds.

    Args:
        seconds: shorter only where a promise of so many seconds is what is tested.
        told: what is shown where it never holds, such as the end of a log.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(poll_seconds)
