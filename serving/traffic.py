"""The versions behind one local API server, as a rollout moves them: a child process each."""

import asyncio
import math
import random
from dataclasses import replace
from itertools import compress
from time import monotonic

from serving.api.dispatcher import Route, Router
from serving.comparison import LIMITS, EngineComparison, JudgedDocument, compared
from serving.engine.process import EngineProcess
from serving.engine.protocol import EngineLost, GenerateRequest, Refused
from serving.logs import log
from serving.rollout import PROBE, CanaryFailed, TrafficSample
from serving.settings import EndpointSettings, OpenAIEngine

PROBE_TOKENS = 2
"""One of the step that reads the prompt, and one of a step that writes."""
DEATH_SECONDS = 5.0
"""Within this time, a request that kills any engine has killed the other one too."""
NOTICE_SECONDS = 0.1
READ_PAUSE = 4.0
"""Between two documents read amid the requests, as a multiple of the time that one took: they take
a fifth of the time."""


class EngineTraffic:
    """A new engine beside those of the router; see `Traffic` for what the methods promise."""

    def __init__(self, router: Router, new: EngineProcess, settings: EndpointSettings) -> None:
        self.version = new.desired.version
        self._router = router
        self._new = new
        self._settings = settings
        self._old = [route for route in router.routes if route.share > 0]
        self._route = Route(new, 0.0)
        # Deaths before this rollout say nothing of it: `observe` looks for one more than these.
        self._deaths = sum(route.engine.restarts for route in self._old)
        self._deviations: list[float] = []
        self._reading: asyncio.Task[None] | None = None

    async def start(self) -> bool:
        try:
            # Whatever fails from here on, `roll_out` calls `roll_back`, which ends this engine.
            await self._new.start()
            await probe(self._new, self._settings)
            if self._new.desired.judged:
                async with asyncio.timeout(self._settings.start_timeout):
                    self._new.comparison = await self._compare()
                log("compared", version=self.version, text=str(self._new.comparison))
        except TimeoutError as error:
            # asyncio's error has no text, and the text is all that is told of the reason.
            raise CanaryFailed(
                "its bits could not be compared with the evaluation's within "
                f"{self._settings.start_timeout:g} s (`endpoint.start_timeout`)"
            ) from error
        except EngineLost as error:
            raise CanaryFailed(f"{error}.{self._new.last_words()}") from error
        except Refused as error:
            raise CanaryFailed(str(error)) from error
        # Only after it has generated text and passed the comparison.
        self._router.routes.append(self._route)
        if self._old and self._new.comparison:
            self._reading = asyncio.create_task(self._read_documents())
        return bool(self._old)

    async def _compare(self) -> EngineComparison | None:
        """Ask the engine how likely every token of what was judged is.

        Returns:
            None where it does not say, and a setting accepts that.

        Raises:
            CanaryFailed: it differs from the evaluation by more than its weights' format explains.
            EngineLost: it ended.
        """
        documents = self._new.desired.judged
        try:
            bits = [await bits_of(self._new, document) for document in documents]
        except Refused as error:
            engine = self._settings.engine
            # This project's own engines tell all likelihoods, so a refusal by one of them is a
            # fault.
            if not isinstance(engine, OpenAIEngine):
                raise
            if not engine.unchecked:
                raise CanaryFailed(
                    f"nothing shows that its engine serves what was judged: {error} "
                    "`endpoint.engine.unchecked: true` accepts that"
                ) from error
            log("not_compared", version=self.version, reason=str(error))
            return None
        comparison = compared(documents, bits, self._settings.weights)
        if not comparison.fits:
            raise CanaryFailed(f"its engine does not serve what was judged: {comparison}")
        return comparison

    async def set_share(self, share: float) -> None:
        self._route.share = share
        for route in self._old:
            route.share = (1.0 - share) / len(self._old)
        # What was seen under the share before does not count for this one.
        _look([self._route, *self._old])

    async def observe(self) -> tuple[TrafficSample, TrafficSample]:
        if not self._new.ready.is_set() or self._new.restarts:
            # A request that kills any engine is tried on the old version after the new one, and
            # must not decide: once both have died, only what one of them alone answers counts.
            died = monotonic()
            while sum(route.engine.restarts for route in self._old) == self._deaths:
                if monotonic() - died > DEATH_SECONDS:
                    raise CanaryFailed("its engine died")
                await asyncio.sleep(NOTICE_SECONDS)
        new, self._deviations = replace(_look([self._route]), deviations=self._deviations), []
        return new, _look(self._old)

    async def promote(self) -> None:
        self._end_watch()
        for route in self._old:
            # Its requests have the time limit of the settings that they began under.
            allowed = max(
                self._settings.request_timeout, route.engine.desired.settings.request_timeout
            )
            await self._router.drain(route, allowed)
            await route.engine.stop()

    async def roll_back(self) -> None:
        self._end_watch()
        # First, so that all new requests go to the old versions while its last answers are given.
        await self.set_share(0.0)
        # A version that failed before its first share has no route.
        if self._route in self._router.routes:
            await self._router.drain(self._route, self._settings.request_timeout)
        await self._new.stop()

    def _end_watch(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _read_documents(self) -> None:
        """Have judged documents read amid the requests, a random one each time.

        The old version reads along, so that both carry the same burden.
        """
        documents, weights = self._new.desired.judged, self._settings.weights
        while True:
            document, began = random.choice(documents), monotonic()  # noqa: S311
            beside = (bits_of(route.engine, document) for route in self._old)
            # An engine that dies here is seen by `observe`, and must not end the reading.
            bits, *_ = await asyncio.gather(
                bits_of(self._new, document), *beside, return_exceptions=True
            )
            if isinstance(bits, float):
                largest = compared([document], [bits], weights).largest
                # By the narrower limit, that for all documents together, since `Evidence` asks
                # about their mean.
                self._deviations.append(largest / LIMITS[weights][0])
            await asyncio.sleep(READ_PAUSE * (monotonic() - began))


async def bits_of(engine: EngineProcess, document: JudgedDocument) -> float:
    """What an engine finds for a document; raises EngineLost or Refused."""
    flags = document.counted or [[True] * (len(window) - 1) for window in document.windows]
    stretches = zip(document.windows, flags, strict=True)
    return sum(await asyncio.gather(*(_bits(engine, *stretch) for stretch in stretches)))


async def _bits(engine: EngineProcess, tokens: list[int], counted: list[bool]) -> float:
    request = GenerateRequest(
        prompt=tokens,
        max_tokens=0,
        max_prompt_tokens=len(tokens),
        stream=False,
        echo=True,
        logprobs=True,
    )
    scores = [score async for chunk in engine.generate(request) for score in chunk.scores]
    # Nothing predicts the first token.
    nats = [score.logprob for score in scores[1:] if score.logprob is not None]
    if len(nats) != len(counted):
        return math.nan
    return -sum(compress(nats, counted)) / math.log(2)


async def probe(engine: EngineProcess, settings: EndpointSettings) -> None:
    """Let a new engine generate a little.

    Raises:
        EngineLost: it broke, generated nothing, or took longer than a request may take.
    """
    request = GenerateRequest(
        prompt=PROBE,
        max_tokens=PROBE_TOKENS,
        max_prompt_tokens=settings.max_prompt_tokens,
    )
    tokens, seconds = 0, settings.request_timeout
    try:
        async with asyncio.timeout(seconds):
            async for chunk in engine.generate(request):
                tokens = chunk.completion_tokens
    except TimeoutError as error:
        raise EngineLost(
            f"the probe got no answer within {seconds:g} s (`endpoint.request_timeout`)"
        ) from error
    if not tokens:
        raise EngineLost("the probe got no answer")


def _look(routes: list[Route]) -> TrafficSample:
    """What was seen of routes together since the last look."""
    total = TrafficSample()
    for route in routes:
        sample = route.look()
        # `then` takes `waiting` from the later sample; these are of the same moment, so they add
        # up.
        total = replace(total.then(sample), waiting=total.waiting + sample.waiting)
    return total
