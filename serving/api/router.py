"""Which engine answers the next request."""

import asyncio
from time import monotonic

from serving.engine.process import EngineLost, EngineProcess
from serving.evidence import Seen
from serving.state import RouteStatus

POLL_SECONDS = 0.05
MOST_SECONDS = 1_000
"""Answers whose seconds are kept until somebody looks."""


class Route:
    """One version with its share of the traffic and what was seen of it."""

    def __init__(self, engine: EngineProcess, share: float) -> None:
        self.engine = engine
        self.share = share
        self.in_flight = 0
        self.credit = 0.0
        self._seen = Seen()

    @property
    def healthy(self) -> bool:
        """Whether the engine is there and answers its health check."""
        return self.engine.ready.is_set() and not self.engine.silent

    @property
    def status(self) -> RouteStatus:
        """What is told of it."""
        engine = self.engine
        return RouteStatus(
            version=engine.desired.version,
            fingerprint=engine.desired.fingerprint,
            share=self.share,
            engine_pid=engine.pid,
            engine_port=engine.port,
            ready=engine.ready.is_set(),
            restarts=engine.restarts,
            engine=engine.engine,
            comparison=engine.comparison,
        )

    def record(self, succeeded: bool | None, tokens: int, seconds: float) -> None:
        """Note how a request went; None where that says nothing about the engine."""
        if succeeded is None:
            return
        self._seen.answered += succeeded
        self._seen.failed += not succeeded
        if succeeded and tokens:
            self._seen.seconds.append(seconds / tokens)
            del self._seen.seconds[:-MOST_SECONDS]

    def look(self) -> Seen:
        """What was seen since the last look."""
        seen, self._seen = self._seen, Seen()
        seen.waiting = self.in_flight
        return seen


class Router:
    """Spreads requests over the routes by their shares, evenly (smooth weighted round-robin)."""

    def __init__(self) -> None:
        self.routes: list[Route] = []
        self.shadow: Route | None = None
        """One of them, without traffic, that gets copies of all requests."""

    @property
    def healthy(self) -> bool:
        """Whether any route with traffic can answer now."""
        return any(route.share > 0 and route.healthy for route in self.routes)

    @property
    def model_names(self) -> list[str]:
        """The pipeline's name, which stays, and the versions that have traffic."""
        serving = [route.engine.desired for route in self.routes if route.share > 0]
        names = [desired.name for desired in serving] + [desired.version for desired in serving]
        return list(dict.fromkeys(names))

    async def choose(self, preferred: Route | None = None) -> Route:
        """The route of the next request, once there is one; raises EngineLost if none serves.

        An engine that is not ready is passed over, so its share goes to the others.

        Args:
            preferred: taken while it can answer.
        """
        while True:
            able = [route for route in self.routes if route.engine.ready.is_set()]
            if preferred in able:
                return preferred
            if able := [route for route in able if route.share > 0]:
                break
            if not any(route.share > 0 for route in self.routes):
                raise EngineLost("no version is being served")
            await asyncio.sleep(POLL_SECONDS)
        for route in able:
            route.credit += route.share
        chosen = max(able, key=lambda route: route.credit)
        chosen.credit -= sum(route.share for route in able)
        return chosen

    async def drain(self, route: Route, seconds: float) -> None:
        """Take a route out and wait until its last answer is given, or the time is over."""
        route.share = 0.0
        end = monotonic() + seconds
        while route.in_flight and monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
        self.routes.remove(route)
