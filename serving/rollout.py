"""Moves traffic from one version to another, and back when the new one disappoints.

One piece of logic for every place that serves; what the place is like stands behind `Traffic`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from time import monotonic
from typing import Protocol

from artifacts.errors import UserError
from serving.settings import RolloutSettings

WATCH_SECONDS = 0.1

Report = Callable[[str], None]


class RolledBack(Exception):
    """The new version was taken out again; the old one has all traffic."""


class RolloutFailed(UserError):
    """The wanted version was taken back; the one before still serves."""


class Disappointing(Exception):
    """The new version did not start, did not write, or did badly on its share."""


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
        """Bring the new version up without traffic, and let it write a little.

        Returns:
            Whether another version has traffic.

        Raises:
            Disappointing, UserError: it did not start, or wrote nothing.
        """
        ...

    async def set_share(self, share: float) -> None:
        """Give the new version a share, 0 to 1, and the old ones the rest; count anew."""
        ...

    async def look(self) -> tuple[Seen, Seen]:
        """What was seen of the new version and of the old ones; raises Disappointing if it died."""
        ...

    async def keep_new(self) -> None:
        """Remove the old versions once their last answers are given."""
        ...

    async def keep_old(self) -> None:
        """Give the old versions everything back, and remove the new one."""
        ...


async def roll_out(
    traffic: Traffic, settings: RolloutSettings, patience: float, report: Report
) -> None:
    """Start a version beside the one that serves, give it traffic in steps, and retire the old one.

    While this runs every request is answered by one version or the other. Ended at any point, all
    traffic is on versions that are whole.

    Args:
        patience: seconds that one request may take.

    Raises:
        RolledBack: the new version could not be loaded, failed its probe, or made too many errors
            or was too slow on its share; it is gone and the old one serves alone.
    """
    try:
        report(f"loading version {traffic.version}")
        beside = await traffic.start()
        for share in settings.steps if beside else ():
            await _watch_step(traffic, share, settings, patience, report)
    except (UserError, Disappointing, TimeoutError) as error:
        await traffic.keep_old()
        raise RolledBack(str(error)) from error
    await traffic.set_share(1.0)
    report(f"version {traffic.version} has all the traffic")
    await traffic.keep_new()


async def _watch_step(
    traffic: Traffic, share: float, settings: RolloutSettings, patience: float, report: Report
) -> None:
    """Give a version a share of the traffic and look at how it goes.

    The step lasts until enough requests were answered to judge by, if any came; at the longest, as
    much longer as one request may take. A version that has answered none of them by then is out.
    """
    report(f"version {traffic.version} gets {share:.0%} of the traffic")
    await traffic.set_share(share)
    started = monotonic()
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        new, old = await traffic.look()
        judge(new, old, settings)
        seconds = monotonic() - started
        enough = all(
            side.answered >= settings.min_requests or not side.requests for side in (new, old)
        )
        if seconds >= settings.step_seconds and enough:
            return
        if seconds > settings.step_seconds + patience:
            if new.requests and not new.answered:
                raise Disappointing(f"it answered none of {new.requests} requests")
            return


def judge(new: Seen, old: Seen, settings: RolloutSettings) -> None:
    """Raise Disappointing where a version fails too often or is too slow beside the old ones."""
    requests = new.answered + new.failed
    if requests and new.failed / requests > settings.max_errors:
        raise Disappointing(f"{new.failed} of {requests} requests failed on it")
    if min(len(old.seconds), len(new.seconds)) >= settings.min_requests:
        slowdown = median(new.seconds) / median(old.seconds)
        if slowdown > settings.max_slowdown:
            raise Disappointing(f"it is {slowdown:.1f} times as slow as the version before")
