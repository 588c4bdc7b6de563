"""Which engine answers a client's requests, whatever happens to it meanwhile.

A router draws a version for each request, by the versions' shares of the traffic; the dispatcher
has it answer, or another one where its engine is lost, and counts for a rollout how each did.
What Prometheus is told is counted here as well.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from secrets import SystemRandom
from time import monotonic
from typing import Any

import prometheus_client as prometheus

from serving.engine.process import EngineProcess
from serving.engine.protocol import Chunk, EngineLost, GenerateRequest, Refused
from serving.errors import ServingError, invalid, unavailable
from serving.rollout import TrafficSample
from serving.settings import EndpointSettings
from serving.state import Desired, RouteStatus

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the duration histogram, in seconds."""


class Metrics:
    """Counts requests by route, status and version; tokens; durations; what is in flight."""

    def __init__(self) -> None:
        self.in_flight = 0
        # The library's default registry takes each name only once in a process.
        self._registry = prometheus.CollectorRegistry()
        counter = partial(prometheus.Counter, registry=self._registry)
        gauge = partial(prometheus.Gauge, registry=self._registry)
        # Or each counter would have a second line, with the time of its first use.
        prometheus.disable_created_metrics()
        self._requests = counter(
            "serving_requests",
            "Requests for answers that have ended, by route, status and version.",
            ["path", "status", "version"],
        )
        self._tokens = counter(
            "serving_tokens", "Tokens of prompts and completions.", ["version", "kind"]
        )
        self._seconds = prometheus.Histogram(
            *("serving_request_seconds", "Seconds to the end of the answer.", ["path"]),
            buckets=BUCKETS,
            registry=self._registry,
        )
        in_flight = gauge("serving_requests_in_flight", "Requests in flight.")
        in_flight.set_function(lambda: self.in_flight)
        self._ready = gauge(
            "serving_engine_ready", "1 if the version's engine is ready, else 0.", ["version"]
        )
        self._share = gauge(
            "serving_traffic_share", "Share of the requests that the version gets.", ["version"]
        )
        self._restarts = counter(
            "serving_engine_restarts",
            "Restarts of the version's engine after it died.",
            ["version"],
        )

    def leave(self) -> None:
        """Note that a request is no longer in flight."""
        self.in_flight -= 1

    def request(self, path: str, status: int, version: str, seconds: float) -> None:
        """Count one answered request."""
        self._requests.labels(path, status, version).inc()
        self._seconds.labels(path).observe(seconds)

    def tokens(self, version: str, prompt: int, completion: int) -> None:
        """Count the tokens of one answer."""
        self._tokens.labels(version, "prompt").inc(prompt)
        self._tokens.labels(version, "completion").inc(completion)

    def render(self, routes: Sequence[RouteStatus]) -> str:
        """The exposition text; routes are those of now, several of which may be of one version."""
        # Emptied first: versions may be gone, and a counter takes no sum, only what is added to it.
        for family in (self._ready, self._share, self._restarts):
            family.clear()
        # Of two routes of one version, a ready one comes last and decides.
        for route in sorted(routes, key=lambda route: route.ready):
            self._ready.labels(route.version).set(route.ready)
            self._share.labels(route.version).inc(route.share)
            self._restarts.labels(route.version).inc(route.restarts)
        return prometheus.generate_latest(self._registry).decode()


POLL_SECONDS = 0.05
MOST_SECONDS = 1_000
"""Answers whose seconds are kept until somebody looks."""
ATTEMPTS = 4
"""How often one request may lose its engine, as it may be the request that kills it."""
STALL_SECONDS = 5.0
"""After so long without a further piece of an answer, a client that leaves may have left because of
that."""
NOTICE_SECONDS = 0.5
"""Until the end of an engine is noticed and it no longer counts as ready."""
Tell = Callable[[Desired, int, Chunk], None]
"""Takes the pieces of answers: by which version, to which of the requests."""


class Route:
    """One version with its share of the traffic and what was seen of it."""

    def __init__(self, engine: EngineProcess, share: float) -> None:
        self.engine = engine
        self.share = share
        self.in_flight = 0
        """What clients asked; several requests of one client's body are one."""
        self.undecided = 0
        """How many of the failures here another version is being asked about."""
        self._seen = TrafficSample()

    @property
    def ready(self) -> bool:
        """Whether the engine is there."""
        return self.engine.ready.is_set()

    @property
    def status(self) -> RouteStatus:
        """What is told of it."""
        engine = self.engine
        return RouteStatus(
            version=engine.desired.version,
            fingerprint=engine.desired.fingerprint,
            share=self.share,
            engine_pid=engine.pid,
            ready=self.ready,
            restarts=engine.restarts,
            engine=engine.engine,
            comparison=engine.comparison,
        )

    def count(self, answered: bool, seconds: float | None) -> None:
        """Note how it did at what a client asked, and how many seconds a token took."""
        self._seen.answered += answered
        self._seen.failed += not answered
        if answered and seconds is not None:
            self._seen.seconds.append(seconds)
            del self._seen.seconds[:-MOST_SECONDS]

    def look(self) -> TrafficSample:
        """What was seen since the last look."""
        sample, self._seen = self._seen, TrafficSample()
        # These two are as they stand now, not what came since the last look.
        sample.waiting, sample.undecided = self.in_flight, self.undecided
        return sample


class Router:
    """Spreads requests over the routes by their shares.

    Each is drawn by itself: a client that knew which version its next request meets could have one
    look worse than the other.
    """

    def __init__(self) -> None:
        # One that no client can predict.
        self._random = SystemRandom()
        self.routes: list[Route] = []

    @property
    def model_names(self) -> list[str]:
        """The pipeline's name, which stays, and the versions that have traffic."""
        serving = [route.engine.desired for route in self.routes if route.share > 0]
        names = [desired.name for desired in serving] + [desired.version for desired in serving]
        return list(dict.fromkeys(names))

    async def choose(self, tried: Collection[Route] = ()) -> Route:
        """The route of the next request, once there is one; raises EngineLost if none serves.

        An engine that is not ready is passed over, so its share goes to the others.

        Args:
            tried: those that lost the request; taken again where there is no other.
        """
        while True:
            serving = [route for route in self.routes if route.share > 0]
            if not serving:
                raise EngineLost("no version is being served")
            # Where none is ready this waits; `_serve` ends the wait at the request's time limit.
            able = [route for route in serving if route.ready]
            if able := [route for route in able if route not in tried] or able:
                return self._random.choices(able, [route.share for route in able])[0]
            await asyncio.sleep(POLL_SECONDS)

    async def drain(self, route: Route, seconds: float) -> None:
        """Take a route out and wait until its last answer is given, or the time is over."""
        # First, so that nothing new is drawn for it; it stays among the routes until it is removed,
        # whose numbers are told on `/metrics` up to its last answer.
        route.share = 0.0
        end = monotonic() + seconds
        while route.in_flight and monotonic() < end:
            await asyncio.sleep(POLL_SECONDS)
        self.routes.remove(route)


class Stream:
    """An answer that arrives piece by piece; it has begun when this exists."""

    def __init__(
        self, by: Desired, pieces: "asyncio.Queue[Chunk | None]", work: asyncio.Task[None]
    ) -> None:
        """`work` takes the pieces from the engine as they come, however the client reads; it is to
        be canceled when that leaves."""
        self.by, self.work = by, work
        self.text = ""
        """What was read of it."""
        self._pieces = pieces

    async def read(self) -> Chunk | None:
        """The next piece, None after the last one, which has a finish reason; raises ServingError
        where it ended early."""
        if chunk := await self._pieces.get():
            self.text += chunk.text
        else:
            await self.work
        return chunk

    @property
    def error(self) -> ServingError | None:
        """Why it ended early, whether that was read or not."""
        has_ended = self.work.done() and not self.work.cancelled()
        error = self.work.exception() if has_ended else None
        return error if isinstance(error, ServingError) else None


class Attempt:
    """One version's try at what a client asks: a request, or several that one version answers."""

    def __init__(self, route: Route, metrics: Metrics, tell: Tell = lambda *_: None) -> None:
        self.route = route
        self.begun = False
        self._metrics, self._tell = metrics, tell
        self._heard = monotonic()
        """When the engine sent something last."""
        self._seconds: list[float] = []
        """For a token, of each complete answer."""

    async def run(self, requests: Sequence[GenerateRequest], deadline: float) -> None:
        """Have all answered; raises Refused, EngineLost, or TimeoutError at the deadline."""
        tasks = [
            asyncio.create_task(self._answer(number, self.route.engine.as_judged(request)))
            for number, request in enumerate(requests)
        ]
        self.route.in_flight += 1
        try:
            async with asyncio.timeout(deadline - monotonic()):
                # The first answer that is lost ends the others: one version gives all answers to a
                # client's body, so another one has to begin them all again.
                await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.route.in_flight -= 1

    @property
    def stalled(self) -> bool:
        """Whether a client that leaves may have left since nothing comes any more."""
        silence = self.route.engine.desired.settings.engine_timeout
        return monotonic() - self._heard > (STALL_SECONDS if self.begun else silence)

    def count(self, answered: bool) -> None:
        """Note for a rollout how it went."""
        seconds = sum(self._seconds) / len(self._seconds) if self._seconds else None
        self.route.count(answered, seconds)

    async def _answer(self, number: int, request: GenerateRequest) -> None:
        """One answer; it goes on where it stopped when its engine is started again."""
        started, text, tokens, total = monotonic(), "", 0, 0
        for _ in range(ATTEMPTS):
            # What a lost engine wrote stays, and the next one goes on after it: its client sees one
            # answer.
            remaining = {"written": text, "max_tokens": request.max_tokens - tokens}
            try:
                part = self.route.engine.generate(request.model_copy(update=remaining))
                async with aclosing(part) as chunks:
                    async for chunk in chunks:
                        # Of an answer in one piece the client has seen nothing, so another version
                        # can still give it.
                        self._heard, self.begun = monotonic(), request.stream
                        text, total = text + chunk.text, tokens + chunk.completion_tokens
                        piece = chunk.model_copy(update={"completion_tokens": total})
                        self._tell(self.route.engine.desired, number, piece)
            except EngineLost:
                # Nothing of it was told, so another version may answer.
                if not text:
                    raise
                tokens = total
                await asyncio.sleep(NOTICE_SECONDS)
                # Its keeper starts the engine again; `run` ends the wait at the deadline.
                await self.route.engine.ready.wait()
            else:
                self._metrics.tokens(self.route.engine.desired.version, chunk.prompt_tokens, total)
                if total:
                    self._seconds.append((monotonic() - started) / total)
                return
        raise EngineLost("the engine ended repeatedly")


class Dispatcher:
    """Routes requests, tries again when an engine dies, and gives up in time."""

    def __init__(self, settings: EndpointSettings) -> None:
        self.settings = settings
        self.router, self.metrics = Router(), Metrics()
        self._background: set[asyncio.Task[Any]] = set()
        """The event loop itself keeps no task alive."""

    async def answer_all(self, requests: Sequence[GenerateRequest]) -> tuple[Desired, list[Chunk]]:
        """One version and its whole answers, in the order of the requests; raises ServingError."""
        answers: dict[int, tuple[Desired, Chunk]] = {}

        def keep(by: Desired, number: int, whole: Chunk) -> None:
            answers[number] = by, whole

        # In one piece: as long as nothing was told, another version can take over.
        whole_requests = [request.model_copy(update={"stream": False}) for request in requests]
        await self._serve(whole_requests, keep)
        by, _ = answers[0]
        return by, [answers[number][1] for number in range(len(requests))]

    async def stream(self, request: GenerateRequest) -> Stream:
        """Begin an answer; raises ServingError where none can begin."""
        beginning: asyncio.Future[Desired] = asyncio.get_running_loop().create_future()
        pieces: asyncio.Queue[Chunk | None] = asyncio.Queue()

        def keep(by: Desired, _: int, chunk: Chunk) -> None:
            pieces.put_nowait(chunk)
            if not beginning.done():
                beginning.set_result(by)

        work = self._spawn(self._serve([request], keep))
        # However it ends: else whoever reads would wait for a piece that never comes.
        work.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            await asyncio.wait([beginning, work], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # `asyncio.wait` does not cancel what it waits for.
            work.cancel()
            raise
        # It ended without a first piece, and raises why.
        if not beginning.done():
            await work
        return Stream(beginning.result(), pieces, work)

    async def _serve(self, requests: Sequence[GenerateRequest], tell: Tell) -> None:
        """Have one version answer all requests, or another one where its engine is lost.

        Raises:
            ServingError: none did, or not to the end.
        """
        deadline = monotonic() + self.settings.request_timeout
        failed: list[Attempt] = []
        answered: Attempt | None = None
        try:
            for _ in range(ATTEMPTS):
                async with asyncio.timeout(deadline - monotonic()):
                    route = await self.router.choose([attempt.route for attempt in failed])
                # A new one each time, also on a route drawn again: what it heard is its own.
                attempt = Attempt(route, self.metrics, tell)
                try:
                    await attempt.run(requests, deadline)
                    answered = attempt
                    return
                except TimeoutError:
                    failed.append(attempt)
                    raise
                except EngineLost as error:
                    failed.append(attempt)
                    if attempt.begun:
                        raise unavailable(f"No engine could finish the answer: {error}.") from error
                    # A dead engine counts as ready until its end is noticed, and would be drawn
                    # again.
                    reason = str(error)
                    await asyncio.sleep(NOTICE_SECONDS)
                except asyncio.CancelledError:
                    # A client that leaves says nothing about a version, unless it waited in vain.
                    if attempt.stalled:
                        failed.append(attempt)
                    raise
            raise EngineLost(reason)
        except TimeoutError:
            text = f"No complete answer after {self.settings.request_timeout:g} s."
            raise ServingError(504, text, "timeout") from None
        except EngineLost as error:
            raise unavailable(f"No engine could answer: {error}.") from error
        except Refused as error:
            raise invalid(str(error), error.field) from error
        finally:
            self._compare(requests, failed, answered)

    def _compare(
        self,
        requests: Sequence[GenerateRequest],
        failed: Sequence[Attempt],
        answered: Attempt | None,
    ) -> None:
        """Count how versions did at what another one answers.

        What no version answers says nothing about any, or a client could have a version taken back
        by requests that cannot be answered. So what failed on one and was not asked of another is
        asked of that, whose answer nobody sees, and counts once it answers.
        """
        # By route: several tries on one version are one failure, as a client's body is one
        # observation.
        failures = {attempt.route: attempt for attempt in failed}
        if answered is not None:
            answered.count(True)
            for route, attempt in failures.items():
                if route is not answered.route:
                    attempt.count(False)
            return
        for rival in self.router.routes if failures else ():
            # One that is slow gets no more of that at once than the endpoint admits.
            fits = rival.ready and rival.in_flight < self.settings.max_waiting
            if rival not in failures and fits:
                # At once, not when the task begins: a look in between would take them for decided.
                for route in failures:
                    route.undecided += 1
                self._spawn(self._ask(rival, requests, list(failures.values())))
                return

    async def _ask(
        self, rival: Route, requests: Sequence[GenerateRequest], failures: Sequence[Attempt]
    ) -> None:
        """Have a version try what others failed on, which counts against them if it succeeds."""
        succeeded = False
        with suppress(EngineLost, Refused, TimeoutError):
            deadline = monotonic() + self.settings.request_timeout
            await Attempt(rival, self.metrics).run(requests, deadline)
            succeeded = True
        for attempt in failures:
            attempt.route.undecided -= 1
            if succeeded:
                attempt.count(False)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task
