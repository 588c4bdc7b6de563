"""Moves traffic from one version to another, and back when the new one disappoints."""

import asyncio
from collections.abc import Callable
from statistics import median
from time import monotonic

from artifacts.errors import UserError
from serving.engine_process import EngineLost, EngineProcess, Refused
from serving.protocol import GenerateRequest
from serving.router import Route, Router
from serving.settings import EndpointSettings, RolloutSettings

WATCH_SECONDS = 0.1

Report = Callable[[str], None]


class RolledBack(Exception):
    """The new version was taken out again; the old one has all traffic."""


async def roll_out(
    router: Router, new: EngineProcess, settings: EndpointSettings, report: Report
) -> None:
    """Start a version beside the one that serves, give it traffic in steps, and retire the old one.

    While this runs every request is answered by one version or the other. Ended at any point, all
    traffic is on versions that are whole.

    Raises:
        RolledBack: the new version could not be loaded, failed its probe, or made too many errors
            or was too slow on its share; it is gone and the old one serves alone.
    """
    old = [route for route in router.routes if route.share > 0]
    try:
        report(f"loading version {new.desired.version}")
        await new.start()
        await probe(new, settings)
        route = router.add(new, 0.0)
        for share in settings.rollout.steps if old else ():
            await _watch_step(route, old, share, settings, report)
    except (UserError, EngineLost, Refused, _Disappointing, TimeoutError) as error:
        _set_shares(old, 1.0)
        for route in [route for route in router.routes if route.engine is new]:
            await router.drain(route, settings.request_timeout)
        await new.stop()
        raise RolledBack(str(error)) from error
    route.share = 1.0
    report(f"version {new.desired.version} has all the traffic")
    for before in old:
        await router.drain(before, settings.request_timeout)
        await before.engine.stop()


async def probe(engine: EngineProcess, settings: EndpointSettings) -> None:
    """Let a new engine write a little.

    Raises:
        EngineLost: it broke, or wrote nothing.
        TimeoutError: it took longer than a request may take.
    """
    request = GenerateRequest(
        prompt=settings.rollout.probe,
        max_tokens=8,
        max_prompt_tokens=settings.max_prompt_tokens,
        temperature=0.0,
        top_p=1.0,
    )
    async with asyncio.timeout(settings.request_timeout):
        tokens = 0
        async for chunk in engine.generate(request):
            tokens = chunk.completion_tokens
    if not tokens:
        raise EngineLost("the probe got no answer")


class _Disappointing(Exception):
    """What was seen of the new version on its share."""


async def _watch_step(
    route: Route, old: list[Route], share: float, settings: EndpointSettings, report: Report
) -> None:
    """Give a version a share of the traffic and look at how it goes.

    The step lasts until enough requests were answered to judge by, if any came; at the longest, as
    much longer as one request may take. A version that has answered none of them by then is out.
    """
    report(f"version {route.engine.desired.version} gets {share:.0%} of the traffic")
    for one in (route, *old):
        one.forget()
    route.share = share
    _set_shares(old, 1.0 - share)
    started = monotonic()
    while True:
        await asyncio.sleep(WATCH_SECONDS)
        _judge(route, old, settings.rollout)
        seconds = monotonic() - started
        requests = route.succeeded + route.failed + route.in_flight
        enough = route.succeeded >= settings.rollout.min_requests or not requests
        if seconds >= settings.rollout.step_seconds and enough:
            return
        if seconds > settings.rollout.step_seconds + settings.request_timeout:
            if not route.succeeded:
                raise _Disappointing(f"it answered none of {requests} requests")
            return


def _judge(route: Route, old: list[Route], settings: RolloutSettings) -> None:
    requests = route.succeeded + route.failed
    if not route.engine.ready.is_set() or route.engine.restarts:
        raise _Disappointing("its engine died")
    if requests and route.failed / requests > settings.max_errors:
        raise _Disappointing(f"{route.failed} of {requests} requests failed on it")
    times = [seconds for one in old for seconds in one.token_seconds]
    if min(len(times), len(route.token_seconds)) >= settings.min_requests:
        slowdown = median(route.token_seconds) / median(times)
        if slowdown > settings.max_slowdown:
            raise _Disappointing(f"it is {slowdown:.1f} times as slow as the version before")


def _set_shares(routes: list[Route], total: float) -> None:
    for route in routes:
        route.share = total / len(routes)
