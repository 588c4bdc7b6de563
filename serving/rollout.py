"""Moves traffic from one version to another, and back when the new one does badly.

One piece of logic for every place that serves; what the place is like stands behind `Traffic`.
"""

import asyncio
from time import monotonic
from typing import Protocol

from artifacts.errors import UserError
from artifacts.progress import Report
from serving.evidence import Evidence, Seen
from serving.settings import RolloutSettings

WATCH_SECONDS = 0.1


class RolledBack(Exception):
    """The new version was taken out again; the old one has all traffic."""


class RolloutFailed(UserError):
    """The wanted version was taken back; the one before still serves."""


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
        """Give the new version a share, 0 to 1, and the old ones the rest; count from zero.

        With a share of 0 it gets copies of all requests, and its answers are dropped.
        """

    async def observe(self) -> tuple[Seen, Seen]:
        """What was seen of the new version and of the old ones since the look or the share before.

        Raises:
            CanaryFailed: the new version died.
        """

    async def promote(self) -> None:
        """Remove the old versions once their last answers are given."""

    async def roll_back(self) -> None:
        """Give the old versions everything back, and remove the new one."""


async def roll_out(
    traffic: Traffic, settings: RolloutSettings, request_seconds: float, report: Report
) -> None:
    """Start a version beside the one that serves, give it traffic in steps, and retire the old one.

    While this runs every request is answered by one version or the other. Ended at any point, all
    traffic is on versions that are whole.

    Args:
        request_seconds: seconds that one request may take.

    Raises:
        RolledBack: the new version could not be loaded, failed its probe, or was found to be worse
            than the old one; it is gone and the old one serves alone.
    """
    evidence = Evidence(settings)
    try:
        report(f"loading version {traffic.version}")
        beside = await traffic.start()
        for share in settings.steps if beside else ():
            await _watch_step(traffic, share, evidence, settings, request_seconds, report)
    except Exception as error:
        # Whatever went wrong, the old version can serve.
        await traffic.roll_back()
        if isinstance(error, UserError | CanaryFailed | TimeoutError):
            raise RolledBack(str(error)) from error
        raise
    await traffic.set_share(1.0)
    seen = f"; {evidence.summary}" if beside and settings.steps else ""
    report(f"version {traffic.version} has all the traffic{seen}")
    await traffic.promote()


async def _watch_step(
    traffic: Traffic,
    share: float,
    evidence: Evidence,
    settings: RolloutSettings,
    request_seconds: float,
    report: Report,
) -> None:
    """Give a version a share of the traffic and watch how it goes.

    The step lasts until each version has answered enough requests, if any came; at the longest, as
    much longer as one request may take. A version that has failed at least as often as it answered
    by then is out, however few requests that were.
    """
    await traffic.set_share(share)
    given = f"{share:.0%} of the traffic" if share else "copies of all requests"
    report(f"version {traffic.version} gets {given}")
    started = monotonic()
    new, old = Seen(), Seen()
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        seen = await traffic.observe()
        evidence.add(*seen, share)
        new, old = new.then(seen[0]), old.then(seen[1])
        if against := evidence.against:
            raise CanaryFailed(against)
        seconds = monotonic() - started
        enough = all(
            side.answered >= settings.min_requests or not side.requests for side in (new, old)
        )
        if seconds >= settings.step_seconds and enough:
            return
        if seconds > settings.step_seconds + request_seconds:
            if new.failed and new.answered <= new.failed:
                raise CanaryFailed(f"it answered {new.answered} of {new.requests} requests")
            report(
                f"version {traffic.version} answered {new.answered} requests, too few to know it "
                f"well (`endpoint.rollout.min_requests` is {settings.min_requests})"
            )
            return
