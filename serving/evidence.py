"""What speaks against a new version beside the old one, however often one looks.

Questions are asked of all requests of a rollout: does the new version fail more often, is it slower
(a little, where both have as many requests; a lot, where they do not), do its bits differ from what
the evaluation measured? Each is a test of whether the mean of
numbers between 0 and 1 is above a bound, by betting (Waudby-Smith and Ramdas, "Estimating means of
bounded random variables by betting", JRSS B 86, 2024): a capital of 1 is staked on every number's
being above its bound. Where none is in expectation, given what came before, the capital is a
supermartingale that is never negative, so it ever reaches 1/a with probability at most a (Ville
1939), whenever one looks and whenever one stops. They share the chance of a false alarm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from serving.settings import RolloutSettings

STAKES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Shares of the capital that are staked, in equal parts: small ones find small differences."""
QUESTIONS = 4
UNEVEN_SLOWDOWN = 2.0
"""Tolerated where one version has more requests than the other: a token of a fuller batch takes
longer, and an engine that is seldom asked finds its caches cold."""


@dataclass
class Seen:
    """What was seen of one side of the traffic since it was looked at before."""

    answered: int = 0
    failed: int = 0
    waiting: int = 0
    """Requests that are under way."""
    seconds: list[float] = field(default_factory=list)
    """Of each answer or of each token, the same on both sides."""
    deviations: list[float] = field(default_factory=list)
    """Of documents read amid the requests: by how much the bits differ from the evaluation's, as a
    multiple of what the format of the weights explains."""

    @property
    def requests(self) -> int:
        """All of them."""
        return self.answered + self.failed + self.waiting

    def then(self, later: "Seen") -> "Seen":
        """Both together."""
        return Seen(
            self.answered + later.answered,
            self.failed + later.failed,
            later.waiting,
            self.seconds + later.seconds,
            self.deviations + later.deviations,
        )


class Bets:
    """The capital of bets that numbers between 0 and 1 lie above their bounds on average."""

    def __init__(self) -> None:
        self._logarithms = [0.0] * len(STAKES)

    def add(self, value: float, bound: float) -> None:
        """Stake on one more number; where nothing is wrong its expectation is at most the bound.

        Args:
            bound: above 0, and known before the number was.
        """
        gain = value / bound - 1
        for number, stake in enumerate(STAKES):
            self._logarithms[number] += math.log1p(stake * gain)

    @property
    def logarithm(self) -> float:
        """Of the capital."""
        largest = max(self._logarithms)
        return largest + math.log(fmean(math.exp(one - largest) for one in self._logarithms))


class Slowness:
    """Whether one version takes more than so many times the seconds of another."""

    def __init__(self, tolerated: float, block: int) -> None:
        """`block` is the number of answers of each version that are compared at a time."""
        self.bets = Bets()
        self.answers = 0
        self._tolerated, self._block = tolerated, block
        self._uncompared: tuple[list[float], list[float]] = ([], [])
        self._seconds = [0.0, 0.0]

    def add(self, new: Sequence[float], old: Sequence[float]) -> None:
        """Compare means of about the same time, so that both had the same load.

        Of two numbers drawn alike, the first is larger with a probability of one half at most. What
        slows one engine for a moment counts once, however many answers it meets.
        """
        for uncompared, seconds in zip(self._uncompared, (new, old), strict=True):
            uncompared.extend(seconds)
        if min(map(len, self._uncompared)) < self._block:
            return
        one, other = (fmean(seconds) for seconds in self._uncompared)
        self.bets.add(float(one > self._tolerated * other), 0.5)
        self._seconds = [self._seconds[0] + one, self._seconds[1] + other]
        self.answers += len(self._uncompared[0])
        self._uncompared = ([], [])

    @property
    def times(self) -> float:
        """Seconds of the new version, as a multiple of the old one's."""
        return self._seconds[0] / self._seconds[1]


class Evidence:
    """All that was seen of a rollout."""

    def __init__(self, settings: RolloutSettings) -> None:
        self._limit = math.log(QUESTIONS / settings.false_alarm)
        self._warm_up = settings.warm_up
        self._failures, self._deviations = Bets(), Bets()
        self._even = Slowness(settings.tolerated_slowdown, settings.block)
        self._uneven = Slowness(UNEVEN_SLOWDOWN, settings.block)
        self._new, self._old = Seen(), Seen()

    def add(self, new: Seen, old: Seen, share: float) -> None:
        """Take what was seen since the last time.

        Args:
            share: of the requests that the new version gets; 0 where it gets copies of all.
        """
        self._new, self._old = self._new.then(new), self._old.then(old)
        # Where both fail alike, each failure meets the new version as often as a request does.
        exposure = share or 0.5
        for value in [1.0] * new.failed + [0.0] * old.failed:
            self._failures.add(value, exposure)
        if self._new.answered > self._warm_up:
            (self._even if exposure == 0.5 else self._uneven).add(new.seconds, old.seconds)
        for deviation in new.deviations:
            self._deviations.add(min(deviation, 2.0) / 2, 0.5)

    @property
    def against(self) -> str | None:
        """What speaks against the new version, in words, or None where nothing does."""
        new = self._new
        if self._failures.logarithm >= self._limit:
            return self._failed
        for speed in (self._even, self._uneven):
            if speed.bets.logarithm >= self._limit:
                return (
                    f"it is slower than the version before: {speed.times:.2f} times as many "
                    f"seconds for a token on average, in {speed.answers} answers"
                )
        if self._deviations.logarithm >= self._limit:
            mean = fmean(new.deviations)
            return (
                f"amid requests its bits differ from the evaluation's by {mean:.1f} times what its "
                f"weights' format explains, in {len(new.deviations)} documents read"
            )
        return None

    @property
    def summary(self) -> str:
        """What was seen, for the log."""
        said = [self._failed]
        if self._even.answers:
            said.append(f"{self._even.times:.2f} times the seconds for a token")
        if self._new.deviations:
            said.append(f"{len(self._new.deviations)} documents read")
        return "; ".join(said)

    @property
    def _failed(self) -> str:
        new, old = self._new, self._old
        return (
            f"{new.failed} of {new.failed + new.answered} requests failed on it, and "
            f"{old.failed} of {old.failed + old.answered} on the version before"
        )
