"""Takes a request to an engine and its answer back, whatever happens to the engine meanwhile."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from time import monotonic

from serving.api.errors import invalid, timed_out, unavailable
from serving.api.metrics import Metrics
from serving.api.router import Route, Router
from serving.engine.process import EngineLost
from serving.engine.protocol import Chunk, GenerateRequest, Refused
from serving.settings import EndpointSettings
from serving.state import OfVersion

ATTEMPTS = 4
"""So often one request may lose its engine: it may be the request that kills it."""
STALL_SECONDS = 5.0
"""Without another word of an answer that has begun, after which a client that leaves counts as the
engine's failure."""
NOTICE_SECONDS = 0.5
"""Until the end of an engine is noticed and it no longer counts as ready."""


@dataclass(frozen=True)
class Answer:
    """A complete answer."""

    by: OfVersion
    whole: Chunk
    """All its text, and what its last piece says."""


@dataclass(frozen=True)
class Stream:
    """An answer that arrives piece by piece; it has begun when this exists."""

    by: OfVersion
    chunks: AsyncGenerator[Chunk, None]
    """All pieces; the last one has a finish reason, or an error."""


class Dispatcher:
    """Routes requests, tries again when an engine dies, and gives up in time."""

    def __init__(self, router: Router, settings: EndpointSettings, metrics: Metrics) -> None:
        self.router = router
        self.settings = settings
        self.metrics = metrics
        self._copies: set[asyncio.Task[None]] = set()
        """Under way; the event loop itself keeps none alive."""

    async def answer_all(self, requests: Sequence[GenerateRequest]) -> list[Answer]:
        """Whole answers by one version, in the order of the requests; raises ServingError."""
        deadline = monotonic() + self.settings.request_timeout
        for _ in range(ATTEMPTS):
            route = await self._route(deadline)
            results = await asyncio.gather(
                *(self._answer(one, route) for one in requests), return_exceptions=True
            )
            for result in results:
                if isinstance(result, BaseException):
                    raise result
            answers = [result for result in results if isinstance(result, Answer)]
            if len({answer.by.version for answer in answers}) == 1:
                return answers
        raise unavailable("The version changed while the batch was answered, again and again.")

    async def _answer(self, request: GenerateRequest, preferred: Route) -> Answer:
        stream = await self.stream(request.model_copy(update={"stream": False}), preferred)
        text, end = "", Chunk()
        async with aclosing(stream.chunks) as chunks:
            async for end in chunks:
                text += end.text
        if end.error == "timeout":
            raise timed_out(self.settings.request_timeout)
        if end.error is not None:
            raise unavailable(f"The model's engine was lost: {end.error}.")
        return Answer(stream.by, end.model_copy(update={"text": text}))

    async def stream(self, request: GenerateRequest, preferred: Route | None = None) -> Stream:
        """Begin an answer; raises ServingError where none can begin."""
        deadline = monotonic() + self.settings.request_timeout
        self._copy(request, deadline)
        lost = ""
        for _ in range(ATTEMPTS):
            route = await self._route(deadline, preferred)
            pieces = self._pieces(request, deadline, route)
            try:
                return Stream(route.engine.desired, _all(await anext(pieces), pieces))
            except Refused as error:
                raise invalid(str(error), error.field) from error
            except TimeoutError:
                raise timed_out(self.settings.request_timeout) from None
            except EngineLost as error:
                lost = str(error)
                await asyncio.sleep(NOTICE_SECONDS)
        raise unavailable(f"No engine could answer: {lost}.")

    async def _route(self, deadline: float, preferred: Route | None = None) -> Route:
        try:
            async with asyncio.timeout(deadline - monotonic()):
                return await self.router.choose(preferred)
        except TimeoutError:
            raise timed_out(self.settings.request_timeout) from None
        except EngineLost as error:
            raise unavailable(f"No engine could answer: {error}.") from error

    def _copy(self, request: GenerateRequest, deadline: float) -> None:
        """Send a request to the version in the shadow too, whose answer is dropped.

        One that is slow gets no more of them at once than the endpoint admits.
        """
        shadow = self.router.shadow
        if shadow and shadow.healthy and shadow.in_flight < self.settings.max_waiting:
            copy = asyncio.create_task(_drop(self._pieces(request, deadline, shadow)))
            self._copies.add(copy)
            copy.add_done_callback(self._copies.discard)

    async def _pieces(
        self, request: GenerateRequest, deadline: float, route: Route
    ) -> AsyncGenerator[Chunk, None]:
        """The pieces of an answer; goes on where it stopped when its engine is started again.

        Errors before the first piece are raised; later ones are the last piece.
        """
        started = heard = monotonic()
        text, tokens = "", 0
        succeeded: bool | None = False
        route.in_flight += 1
        try:
            for _ in range(ATTEMPTS):
                left = {"written": text, "max_tokens": request.max_tokens - tokens}
                part = request.model_copy(update=left)
                try:
                    async with aclosing(_timed(route, part, deadline)) as chunks:
                        async for chunk in chunks:
                            text, heard = text + chunk.text, monotonic()
                            whole = tokens + chunk.completion_tokens
                            last = chunk.model_copy(update={"completion_tokens": whole})
                            yield last
                    succeeded = True
                    self.metrics.tokens(route.engine.desired.version, last.prompt_tokens, whole)
                    return
                except EngineLost as error:
                    if not text:
                        raise
                    tokens = whole
                    await asyncio.sleep(NOTICE_SECONDS)
                    if not await _ready_again(route, deadline):
                        yield Chunk(error=str(error))
                        return
                except TimeoutError:
                    if not text:
                        raise
                    yield Chunk(error="timeout")
                    return
            yield Chunk(error="the engine was lost again and again")
        except (Refused, GeneratorExit, asyncio.CancelledError):
            # Neither a request that cannot be served nor a client that left says anything about
            # the engine, unless the client left because nothing came any more.
            allowed = STALL_SECONDS if text else self.settings.engine_timeout
            succeeded = False if monotonic() - heard > allowed else None
            raise
        finally:
            route.in_flight -= 1
            route.record(succeeded, tokens or len(text) // 4, monotonic() - started)


async def _timed(
    route: Route, request: GenerateRequest, deadline: float
) -> AsyncGenerator[Chunk, None]:
    """An engine's pieces; raises TimeoutError where the next one comes too late."""
    async with aclosing(route.engine.generate(request)) as chunks:
        while True:
            async with asyncio.timeout(deadline - monotonic()):
                chunk = await anext(chunks, None)
            if chunk is None:
                return
            yield chunk


async def _all(first: Chunk, rest: AsyncGenerator[Chunk, None]) -> AsyncGenerator[Chunk, None]:
    async with aclosing(rest) as following:
        yield first
        async for chunk in following:
            yield chunk


async def _drop(pieces: AsyncGenerator[Chunk, None]) -> None:
    with suppress(EngineLost, Refused, TimeoutError):
        async with aclosing(pieces) as inner:
            async for _ in inner:
                pass


async def _ready_again(route: Route, deadline: float) -> bool:
    try:
        await asyncio.wait_for(route.engine.ready.wait(), max(deadline - monotonic(), 0))
    except TimeoutError:
        return False
    return True
