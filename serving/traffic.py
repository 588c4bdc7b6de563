"""The versions behind one local API server, as a rollout moves them: a child process each."""

import asyncio
import math
from collections.abc import Sequence

from serving.api.router import Route, Router
from serving.comparison import Comparison, JudgedDocument, compared
from serving.engine.process import EngineLost, EngineProcess, Refused
from serving.engine.protocol import GenerateRequest
from serving.rollout import CanaryFailed, Seen
from serving.settings import EndpointSettings, Weights
from serving.telemetry import log

PROBE_TOKENS = 8


class EngineTraffic:
    """A new engine beside those of the router; see `Traffic` for what the methods promise."""

    def __init__(self, router: Router, new: EngineProcess, settings: EndpointSettings) -> None:
        self._router = router
        self._new = new
        self._settings = settings
        self._old = [route for route in router.routes if route.share > 0]
        self._route = Route(new, 0.0)

    @property
    def version(self) -> str:
        return self._new.desired.version

    async def start(self) -> bool:
        try:
            await self._new.start()
            await probe(self._new, self._settings)
            if self._new.desired.judged:
                async with asyncio.timeout(self._settings.start_timeout):
                    self._new.comparison = await compare(
                        self._new, self._new.desired.judged, self._settings.weights
                    )
                log("compared", version=self.version, text=str(self._new.comparison))
        except (EngineLost, Refused) as error:
            raise CanaryFailed(str(error)) from error
        self._router.routes.append(self._route)
        return bool(self._old)

    async def set_share(self, share: float) -> None:
        for route in (self._route, *self._old):
            route.forget()
        self._route.share = share
        for route in self._old:
            route.share = (1.0 - share) / len(self._old)

    async def observe(self) -> tuple[Seen, Seen]:
        if not self._new.ready.is_set() or self._new.restarts:
            raise CanaryFailed("its engine died")
        if self._new.silent:
            raise CanaryFailed("its engine answers no more")
        return _seen([self._route]), _seen(self._old)

    async def promote(self) -> None:
        for route in self._old:
            await self._router.drain(route, self._settings.request_timeout)
            await route.engine.stop()

    async def roll_back(self) -> None:
        await self.set_share(0.0)
        if self._route in self._router.routes:
            await self._router.drain(self._route, self._settings.request_timeout)
        await self._new.stop()


async def compare(
    engine: EngineProcess, documents: Sequence[JudgedDocument], weights: Weights
) -> Comparison:
    """Ask an engine how likely every token of what was judged is.

    Raises:
        CanaryFailed: it differs from the evaluation by more than its weights' format explains.
        EngineLost: it ended.
    """
    found = []
    for document in documents:
        windows = await asyncio.gather(*(_bits(engine, window) for window in document.windows))
        found.append(sum(windows))
    comparison = compared(documents, found, weights)
    if not comparison.fits:
        raise CanaryFailed(f"its engine does not serve what was judged: {comparison}")
    return comparison


async def _bits(engine: EngineProcess, tokens: list[int]) -> float:
    request = GenerateRequest(
        prompt=tokens,
        max_tokens=0,
        max_prompt_tokens=len(tokens),
        temperature=0.0,
        top_p=1.0,
        stream=False,
        echo=True,
        logprobs=True,
    )
    scores = [score async for chunk in engine.generate(request) for score in chunk.scores]
    nats = [score.logprob for score in scores[1:] if score.logprob is not None]
    return -sum(nats) / math.log(2) if len(nats) == len(tokens) - 1 else math.nan


async def probe(engine: EngineProcess, settings: EndpointSettings) -> None:
    """Let a new engine generate a little.

    Raises:
        EngineLost: it broke, or generated nothing.
        TimeoutError: it took longer than a request may take.
    """
    request = GenerateRequest(
        prompt=settings.rollout.probe,
        max_tokens=PROBE_TOKENS,
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


def _seen(routes: list[Route]) -> Seen:
    return Seen(
        answered=sum(route.succeeded for route in routes),
        failed=sum(route.failed for route in routes),
        waiting=sum(route.in_flight for route in routes),
        seconds=[seconds for route in routes for seconds in route.token_seconds],
    )
