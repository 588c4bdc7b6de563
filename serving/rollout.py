"""Moves traffic from one version to another, and back when the new one does badly.

One piece of logic for every place that serves; what the place is like stands behind `Traffic`.
"""

import asyncio
from dataclasses import dataclass, field
from statistics import median
from time import monotonic
from typing import Protocol

from artifacts.errors import UserError
from artifacts.progress import Report
from serving.settings import RolloutSettings

WATCH_SECONDS = 0.1


class RolledBack(Exception):
    """The new version was taken out again; the old one has all traffic."""


class RolloutFailed(UserError):
    """The wanted version was taken back; the one before still serves."""


class CanaryFailed(Exception):
    """The new version did not start, did not generate, or did badly on its share."""


@dataclass
class Seen:
    """What was seen of one side of the traffic since its share last changed."""

    answered: int = 0
    failed: int = 0
    waiting: int = 0
    """Requests that are under way."""
    seconds: list[float] = field(default_factory=list)
    """Of each answer or of each token, the same on both sides."""

    @property
    def requests(self) -> int:
        """All of them."""
        return self.answered + self.failed + self.waiting


class Traffic(Protocol):
    """A new version beside the old ones that serve, and how requests are spread over them.

    Whatever a method leaves half done when its process is killed, all traffic is on whole versions.
    """

    @property
    def version(self) -> str:
        """The new version's name."""
        ...

    async def start(self) -> bool:
        """Bring the new version up without traffic, and let it generate a little.

        Returns:
            Whether another version has traffic.

        Raises:
            CanaryFailed, UserError: it did not start, or generated nothing.
        """
        ...

    async def set_share(self, share: float) -> None:
        """Give the new version a share, 0 to 1, and the old ones the rest; count from zero."""
        ...

    async def observe(self) -> tuple[Seen, Seen]:
        """What was seen of the new version and of the old ones; raises CanaryFailed if it died."""
        ...

    async def promote(self) -> None:
        """Remove the old versions once their last answers are given."""
        ...

    async def roll_back(self) -> None:
        """Give the old versions everything back, and remove the new one."""
        ...


async def roll_out(
    traffic: Traffic, settings: RolloutSettings, request_seconds: float, report: Report
) -> None:
    """Start a version beside the one that serves, give it traffic in steps, and retire the old one.

    While this runs every request is answered by one version or the other. Ended at any point, all
    traffic is on versions that are whole.

    Args:
        request_seconds: seconds that one request may take.

    Raises:
        RolledBack: the new version could not be loaded, failed its probe, or made too many errors
            or was too slow on its share; it is gone and the old one serves alone.
    """
    try:
        report(f"loading version {traffic.version}")
        beside = await traffic.start()
        for share in settings.steps if beside else ():
            await _watch_step(traffic, share, settings, request_seconds, report)
    except (UserError, CanaryFailed, TimeoutError) as error:
        await traffic.roll_back()
        raise RolledBack(str(error)) from error
    except Exception:
        # Whatever went wrong here, the old version can serve.
        await traffic.roll_back()
        raise
    await traffic.set_share(1.0)
    report(f"version {traffic.version} has all the traffic")
    await traffic.promote()


async def _watch_step(
    traffic: Traffic,
    share: float,
    settings: RolloutSettings,
    request_seconds: float,
    report: Report,
) -> None:
    """Give a version a share of the traffic and watch how it goes.

    The step lasts until enough requests were answered to compare, if any came; at the longest, as
    much longer as one request may take. A version that has failed at least as often as it answered
    by then is out.
    """
    await traffic.set_share(share)
    report(f"version {traffic.version} gets {share:.0%} of the traffic")
    started = monotonic()
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        new, old = await traffic.observe()
        check(new, old, settings)
        seconds = monotonic() - started
        enough = all(
            side.answered >= settings.min_requests or not side.requests for side in (new, old)
        )
        if seconds >= settings.step_seconds and enough:
            return
        if seconds > settings.step_seconds + request_seconds:
            if new.requests and new.answered <= new.failed:
                raise CanaryFailed(f"it answered {new.answered} of {new.requests} requests")
            return


def check(new: Seen, old: Seen, settings: RolloutSettings) -> None:
    """Raise CanaryFailed where a version fails too often or is too slow beside the old ones.

    Errors count from `min_requests` on, and only as far as they exceed the old versions' share:
    what troubles both is not the new version's fault.
    """
    requests = new.answered + new.failed
    excess = _error_rate(new) - _error_rate(old)
    if requests >= settings.min_requests and excess > settings.max_errors:
        raise CanaryFailed(
            f"{new.failed} of {requests} requests failed on it, and {old.failed} of "
            f"{old.answered + old.failed} on the version before"
        )
    if min(len(old.seconds), len(new.seconds)) >= settings.min_requests:
        slowdown = median(new.seconds) / median(old.seconds)
        if slowdown > settings.max_slowdown:
            raise CanaryFailed(f"it is {slowdown:.1f} times as slow as the version before")


def _error_rate(seen: Seen) -> float:
    return seen.failed / max(seen.answered + seen.failed, 1)
