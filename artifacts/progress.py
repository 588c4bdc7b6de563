"""Says how far counted work is, often enough to reassure and seldom enough to read."""

import time
from collections.abc import Callable

REPORT_SECONDS = 5.0

Report = Callable[[str], None]
"""Takes a line for whoever watches: Dagster's log, a terminal, a test."""


class CountedProgress:
    """Turns counts into lines such as `scoring: 1,240 of 3,100 documents, about 12 s to go`."""

    def __init__(self, report: Report, label: str, total: int, unit: str) -> None:
        self._report = report
        self._label = label
        self._total = total
        self._unit = unit
        self._started = self._last = time.monotonic()

    def advance(self, done: int) -> None:
        """Report `done` units, unless the last report is less than five seconds old."""
        now = time.monotonic()
        if now - self._last < REPORT_SECONDS:
            return
        self._last = now
        seconds = (now - self._started) / max(done, 1) * (self._total - done)
        to_go = f", about {format_duration(seconds)} to go" if done else ""
        self._report(f"{self._label}: {done:,} of {self._total:,} {self._unit}{to_go}")


def counted(count: float, noun: str, form: str = ",") -> str:
    """How many there are: `1 token`, `1,240 tokens`."""
    number = f"{count:{form}}"
    return f"{number} {noun}{'s' * (number != '1')}"


def percent(share: float) -> str:
    """A share, with as many digits as a small one needs not to read as none: `12.3%`, `0.005%`."""
    return f"{share:.1%}" if share >= 0.001 or not share else f"{100 * share:.1g}%"


def format_duration(seconds: float) -> str:
    """Seconds as people say them: `12 s`, `3 min 5 s`, `2 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
