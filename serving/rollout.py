"""Moves traffic from one version to another, and back when the new one does badly.

One piece of logic for every place that serves; what the place is like stands behind `Traffic`.

Questions are asked of all requests of a rollout: does the new version fail more often, is it slower
(a little, where both have as many requests; a lot, where they do not), do its bits differ from what
the evaluation measured? Each is a test of whether the mean of numbers between 0 and 1 is above a
bound, by betting (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by
betting", JRSS B 86, 2024): a capital of 1 is staked on every number's being above its bound. Where
none is in expectation, given what came before, the capital is a supermartingale that is never
negative, so it ever reaches 1/a with probability at most a (Ville 1939), whenever one looks and
whenever one stops. They share the chance of a false alarm.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from time import monotonic
from typing import Protocol

from artifacts.errors import UserError
from artifacts.progress import Report
from serving.settings import RolloutSettings

WATCH_SECONDS = 0.1
STAKES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95)
"""Shares of the capital that are staked, in equal parts: small ones find small differences."""
QUESTIONS = 4
"""Failures, speed with equal and with unequal shares, deviations: they share `FALSE_ALARM`."""
FALSE_ALARM = 0.01
"""Chance that a version which is no worse than the old one is taken back."""
LIMIT = math.log(QUESTIONS / FALSE_ALARM)
"""Logarithm of the capital at which a question is answered, by its part of that chance."""
TOLERATED_SLOWDOWN = 1.05
"""Seconds for a token, as a multiple of the old version's, that do not count as slower."""
UNEVEN_SLOWDOWN = 2.0
"""Tolerated where one version has more requests than the other: a token of a fuller batch takes
longer, and an engine that is seldom asked finds its caches cold."""
PROBE = "The"
"""Prompt that a new version must continue before it gets any traffic."""


@dataclass
class TrafficSample:
    """What was seen of one side of the traffic since it was looked at before."""

    answered: int = 0
    failed: int = 0
    """Of what another version answered."""
    waiting: int = 0
    """Requests that are under way."""
    undecided: int = 0
    """Of those that failed, which do not count yet: another version is asked the same."""
    seconds: list[float] = field(default_factory=list)
    """Of each answer or of each token, the same on both sides."""
    deviations: list[float] = field(default_factory=list)
    """Of documents read amid the requests: by how much the bits differ from the evaluation's, as a
    multiple of what the format of the weights explains."""

    @property
    def requests(self) -> int:
        """All of them."""
        return self.answered + self.failed + self.undecided + self.waiting

    def then(self, later: "TrafficSample") -> "TrafficSample":
        """Both together."""
        return TrafficSample(
            self.answered + later.answered,
            self.failed + later.failed,
            later.waiting,
            later.undecided,
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
            # No stake is all of the capital, so that a number of 0 leaves some of it.
            self._logarithms[number] += math.log1p(stake * gain)

    @property
    def logarithm(self) -> float:
        """Of the capital."""
        # Divided by the largest before they are added: the capital itself may be more than a float.
        largest = max(self._logarithms)
        return largest + math.log(fmean(math.exp(value - largest) for value in self._logarithms))


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
        new_mean, old_mean = (fmean(seconds) for seconds in self._uncompared)
        self.bets.add(float(new_mean > self._tolerated * old_mean), 0.5)
        self._seconds = [self._seconds[0] + new_mean, self._seconds[1] + old_mean]
        self.answers += len(self._uncompared[0])
        self._uncompared = ([], [])

    @property
    def times(self) -> float:
        """Seconds of the new version, as a multiple of the old one's."""
        return self._seconds[0] / self._seconds[1]


class Evidence:
    """All that was seen of a rollout."""

    def __init__(self, settings: RolloutSettings) -> None:
        self._warm_up = settings.warm_up
        self._failures, self._deviations = Bets(), Bets()
        self._even = Slowness(TOLERATED_SLOWDOWN, settings.block)
        self._uneven = Slowness(UNEVEN_SLOWDOWN, settings.block)
        self._new, self._old = TrafficSample(), TrafficSample()

    def add(self, new: TrafficSample, old: TrafficSample, share: float) -> None:
        """Take what was seen since the last time.

        Args:
            share: of the requests that the new version gets.
        """
        self._new, self._old = self._new.then(new), self._old.then(old)
        # Where both fail alike, each failure meets the new version as often as a request does.
        for value in [1.0] * new.failed + [0.0] * old.failed:
            self._failures.add(value, share)
        if self._new.answered > self._warm_up:
            (self._even if share == 0.5 else self._uneven).add(new.seconds, old.seconds)
        for deviation in new.deviations:
            # Bets take numbers between 0 and 1. What the format explains is a deviation of 1, here
            # 0.5.
            self._deviations.add(min(deviation, 2.0) / 2, 0.5)

    @property
    def against(self) -> str | None:
        """What speaks against the new version, in words, or None where nothing does."""
        new = self._new
        if self._failures.logarithm >= LIMIT:
            return self._failed
        for speed in (self._even, self._uneven):
            if speed.bets.logarithm >= LIMIT:
                return (
                    f"it is slower than the version before: it takes {speed.times:.2f} times as "
                    f"many seconds per token on average over {speed.answers} answers"
                )
        if self._deviations.logarithm >= LIMIT:
            mean = fmean(new.deviations)
            return (
                f"during the rollout, its bits differ from the evaluation's by {mean:.1f} times "
                "the limit for its weights' format, on average over "
                f"{len(new.deviations)} readings of held-out documents"
            )
        return None

    @property
    def summary(self) -> str:
        """What was seen, for the log."""
        parts = [self._failed]
        if self._even.answers:
            parts.append(f"{self._even.times:.2f} times the seconds per token")
        if self._new.deviations:
            parts.append(f"{len(self._new.deviations)} readings of held-out documents")
        return "; ".join(parts)

    @property
    def _failed(self) -> str:
        new, old = self._new, self._old
        return (
            f"{new.failed} of {new.failed + new.answered} requests failed on it, and "
            f"{old.failed} of {old.failed + old.answered} on the version before"
        )


class RolledBack(Exception):
    """The new version was taken out again; the old one has all traffic."""


class RolloutFailed(UserError):
    """The wanted version was taken back, or the endpoint stopped: no other is to take its place."""


class NoLongerWanted(Exception):
    """Another version is wanted by now: this one gets no more of the traffic."""

    def __init__(self) -> None:
        super().__init__("another version is wanted by now")


class CanaryFailed(Exception):
    """The new version did not start, did not generate, or did badly on its share."""


class Traffic(Protocol):
    """A new version beside the old ones that serve, and how requests are spread over them.

    Whatever a method leaves half done when its process is killed, all traffic is on whole versions.
    """

    version: str
    """The new one's name."""

    async def start(self) -> bool:
        """Bring the new version up without traffic, and let it generate a little.

        Returns:
            Whether another version has traffic.

        Raises:
            CanaryFailed, UserError: it did not start, or generated nothing.
        """

    async def set_share(self, share: float) -> None:
        """Give the new version a share, above 0, and the old ones the rest; count from zero."""

    async def observe(self) -> tuple[TrafficSample, TrafficSample]:
        """What was seen of the new version and of the old ones since the look or the share before.

        Raises:
            CanaryFailed: the new version died.
        """

    async def promote(self) -> None:
        """Remove the old versions once their last answers are given."""

    async def roll_back(self) -> None:
        """Give the old versions everything back, and remove the new one."""


async def roll_out(
    traffic: Traffic,
    settings: RolloutSettings,
    request_seconds: float,
    report: Report,
    still_wanted: Callable[[], bool] = lambda: True,
) -> None:
    """Start a version beside the one that serves, give it traffic in steps, and retire the old one.

    While this runs every request is answered by one version or the other. Ended at any point, all
    traffic is on versions that are whole.

    Args:
        request_seconds: seconds that one request may take.
        still_wanted: asked while the version loads, and at every look at its traffic.

    Raises:
        RolledBack: the new version could not be loaded, failed its probe, or was found to be worse
            than the old one; it is gone and the old one serves alone.
        NoLongerWanted: the same holds, since another version is wanted by now.
    """
    rollout = _Rollout(traffic, settings, request_seconds, report, still_wanted)
    try:
        report(f"loading version {traffic.version}")
        beside = await rollout.start()
        # Where no other version has traffic, there is nothing to compare this one with.
        for share in settings.steps if beside else ():
            await rollout.watch_step(share)
    except Exception as error:
        # Whatever went wrong, the old version can serve.
        await traffic.roll_back()
        if isinstance(error, UserError | CanaryFailed | TimeoutError):
            raise RolledBack(str(error)) from error
        raise
    # Outside of the above: a version that has all the traffic is not taken back for what fails
    # after.
    await traffic.set_share(1.0)
    suffix = f"; {rollout.evidence.summary}" if beside and settings.steps else ""
    report(f"version {traffic.version} has all the traffic{suffix}")
    await traffic.promote()


@dataclass
class _Rollout:
    """What `roll_out` was given, and what was seen."""

    traffic: Traffic
    settings: RolloutSettings
    request_seconds: float
    report: Report
    still_wanted: Callable[[], bool]

    def __post_init__(self) -> None:
        # One for all steps: what was seen at a small share still speaks at the next one.
        self.evidence = Evidence(self.settings)

    async def start(self) -> bool:
        """Start a version, unless another is wanted before it has started.

        A large model loads for minutes, in which somebody may decide otherwise.
        """
        starting = asyncio.create_task(self.traffic.start())
        try:
            while not (await asyncio.wait([starting], timeout=WATCH_SECONDS))[0]:
                self._check_wanted()
            beside = await starting
        finally:
            # `cancel` returns False once it has ended. Else it is waited for, so that it changes
            # nothing after the traffic is rolled back.
            if starting.cancel():
                await asyncio.wait([starting])
        self._check_wanted()
        return beside

    def _check_wanted(self) -> None:
        if not self.still_wanted():
            raise NoLongerWanted

    async def watch_step(self, share: float) -> None:
        """Give a version a share of the traffic and watch how it goes.

        The step lasts until each version has answered enough requests, if any came; at the longest,
        as much longer as one request may take, and as long again where what failed is still asked
        of the other version. One that by then has failed at least as often as it answered is out,
        however few requests that were.
        """
        name, settings = self.traffic.version, self.settings
        await self.traffic.set_share(share)
        self.report(f"version {name} gets {share:.0%} of the traffic")
        started = monotonic()
        new, old = TrafficSample(), TrafficSample()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            self._check_wanted()
            samples = await self.traffic.observe()
            self.evidence.add(*samples, share)
            new, old = new.then(samples[0]), old.then(samples[1])
            # Before whether the step is over: its last answers may be the ones that speak against
            # it.
            if against := self.evidence.against:
                raise CanaryFailed(against)
            seconds = monotonic() - started
            # A side that got no request at all is not waited for: an endpoint may have no clients.
            enough = all(
                side.answered >= settings.min_requests or not side.requests for side in (new, old)
            )
            if seconds >= settings.step_seconds and enough:
                return
            longest = self.request_seconds * (2 if new.undecided else 1)
            if seconds > settings.step_seconds + longest:
                if new.failed and new.answered <= new.failed:
                    raise CanaryFailed(
                        f"it answered {new.answered} of {new.answered + new.failed} requests; the "
                        "version before answered the others"
                    )
                self.report(
                    f"version {name} answered {new.answered} requests, the version before "
                    f"{old.answered}; `endpoint.rollout.min_requests` asks for "
                    f"{settings.min_requests} of each"
                )
                return
