"""What a rollout, and Prometheus, is told of requests to two versions, with an engine of each."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from starlette.types import Message

from serving.api import dispatcher as dispatching
from serving.api.app import build_app
from serving.api.dispatcher import Dispatcher, Metrics, Route, Stream
from serving.engine import process as engine_process
from serving.engine.process import EngineProcess
from serving.engine.protocol import GenerateRequest
from serving.errors import ServingError
from serving.rollout import TrafficSample
from serving.settings import EndpointSettings
from serving.state import RouteStatus
from tests.faults import stopped
from tests.serving.conftest import SETTINGS, desired
from tests.waiting import WAIT_SECONDS

TOKENS = 16_000
IMPATIENT = SETTINGS.model_copy(update={"request_timeout": 0.5})
CUT_SHORT = SETTINGS.model_copy(update={"request_timeout": 3.0, "max_new_tokens": TOKENS})
"""Time for the beginning of an answer, on a busy machine, too, and not for an endless one's end."""
NEVER = 1e-12
"""A share of the traffic that gets a request where nothing else can."""
QUICK = GenerateRequest(prompt="The valve", max_tokens=3, max_prompt_tokens=80)
ENDLESS = QUICK.model_copy(update={"max_tokens": TOKENS, "ignore_eos": True})
"""Takes longer than any of these tests has."""


class Versions:
    """Two engines of one model, the new one and the old one, in one event loop."""

    def __init__(self, folder: Path, place: Path, runner: asyncio.Runner) -> None:
        self.run = runner.run
        self.new, self.old = (
            EngineProcess(desired(folder, name, cache_tokens=2 * TOKENS), place / f"{name}.log")
            for name in ("new", "old")
        )

    def serve(
        self, new: float = 0.5, settings: EndpointSettings = SETTINGS
    ) -> tuple[Dispatcher, Route, Route]:
        """Both behind one dispatcher, the new one with a share of the traffic."""
        dispatcher = Dispatcher(settings)
        routes = [Route(self.new, new or NEVER), Route(self.old, 1 - new or NEVER)]
        dispatcher.router.routes = routes
        return dispatcher, *routes


@pytest.fixture(scope="module")
def versions(
    long_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Versions]:
    with asyncio.Runner() as runner:
        both = Versions(long_model_folder, tmp_path_factory.mktemp("versions"), runner)
        for engine in (both.new, both.old):
            both.run(engine.start())
        yield both
        for engine in (both.new, both.old):
            both.run(engine.stop())


async def until(state: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not state():
            await asyncio.sleep(0.01)


async def decided(*routes: Route) -> list[TrafficSample]:
    """What was seen, once nothing is under way or undecided."""
    await until(lambda: not any(route.in_flight or route.undecided for route in routes))
    return [route.look() for route in routes]


async def read(stream: Stream) -> list[str | None]:
    """The ends of the pieces of an answer; raises ServingError where it ended early."""
    pieces = []
    while chunk := await stream.read():
        pieces.append(chunk.finish_reason)
    return pieces


@pytest.mark.fault(
    "endpoint",
    "rollout, requests that no version answers in time",
    sees="504",
    then="they do not count against the new version",
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("new", [0.0, 1.0], ids=["the old one is asked", "the new one is asked"])
def test_what_neither_version_answers_says_nothing_about_one(
    versions: Versions, stream: bool, new: float
) -> None:
    async def ask() -> list[TrafficSample]:
        dispatcher, *routes = versions.serve(new, IMPATIENT)
        # A stream may have begun by then.
        with pytest.raises(ServingError, match=r"after 0\.5 s"):
            if stream:
                await read(await dispatcher.stream(ENDLESS))
            else:
                await dispatcher.answer_all([ENDLESS])
        return await decided(*routes)

    for seen in versions.run(ask()):
        assert (seen.answered, seen.failed) == (0, 0)


def test_what_the_other_version_answers_counts_against_one_that_does_not(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is neither told to go on nor replaced meanwhile.
    monkeypatch.setattr(engine_process, "CONTINUE_SECONDS", 1_000)

    async def ask() -> list[TrafficSample]:
        patient = SETTINGS.model_copy(update={"request_timeout": 10.0})
        dispatcher, *routes = versions.serve(1.0, patient)
        assert versions.new.pid is not None
        with stopped(versions.new.pid):
            with pytest.raises(ServingError):
                await dispatcher.answer_all([QUICK])
            return await decided(*routes)

    new, old = versions.run(ask())
    assert (new.answered, new.failed) == (0, 1)
    assert (old.answered, old.failed) == (0, 0), "it was asked for comparison, by no client"


def test_a_request_whose_engine_dies_is_answered_by_the_other_version(versions: Versions) -> None:
    async def ask() -> list[TrafficSample]:
        dispatcher, *routes = versions.serve(1.0)
        long = ENDLESS.model_copy(update={"max_tokens": 400})
        asked = asyncio.create_task(dispatcher.answer_all([long]))
        await until(lambda: routes[0].in_flight)
        psutil.Process(versions.new.pid).kill()
        by, (answer,) = await asked
        assert by.version == "old" and answer.completion_tokens == 400
        await versions.new.ready.wait()
        return await decided(*routes)

    new, old = versions.run(ask())
    assert (new.answered, new.failed) == (0, 1)
    assert (old.answered, old.failed) == (1, 0)


def test_a_clients_many_prompts_are_one_observation(versions: Versions) -> None:
    """They go to one version, so they fail together, by one draw."""

    async def ask() -> list[TrafficSample]:
        dispatcher, *routes = versions.serve(1.0)
        _, answers = await dispatcher.answer_all([QUICK] * 8)
        assert len(answers) == 8
        return await decided(*routes)

    new, _ = versions.run(ask())
    assert (new.answered, new.failed, len(new.seconds)) == (1, 0, 1)


def test_a_client_that_does_not_read_does_not_make_its_version_slow(versions: Versions) -> None:
    async def ask() -> tuple[list[TrafficSample], list[str | None]]:
        dispatcher, *routes = versions.serve(1.0)
        stream = await dispatcher.stream(ENDLESS.model_copy(update={"max_tokens": 40}))
        return await decided(*routes), await read(stream)

    (new, _), pieces = versions.run(ask())
    assert new.answered == len(new.seconds) == 1, "before a piece was read"
    assert pieces[-1] == "length" and len(pieces) > 5


def test_an_answer_that_stops_counts_as_failed_though_its_client_leaves(
    versions: Versions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching, "STALL_SECONDS", 1.0)
    # It is not told to go on meanwhile.
    monkeypatch.setattr(engine_process, "CONTINUE_SECONDS", 1_000)
    asked = ENDLESS.model_copy(update={"max_tokens": 2_000})

    async def leave_after(pause: float) -> list[TrafficSample]:
        dispatcher, *routes = versions.serve(1.0)
        stream = await dispatcher.stream(asked)
        assert versions.new.pid is not None
        with stopped(versions.new.pid):
            await asyncio.sleep(pause)
            stream.work.cancel()
            with suppress(asyncio.CancelledError):
                await stream.work
            return await decided(*routes)

    at_once, late = versions.run(leave_after(0.0)), versions.run(leave_after(3.0))
    assert [(seen.answered, seen.failed) for seen in at_once] == [(0, 0), (0, 0)]
    assert [(seen.answered, seen.failed) for seen in late] == [(0, 1), (0, 0)]


def test_nobody_can_tell_which_version_the_next_request_meets(versions: Versions) -> None:
    dispatcher, new, _ = versions.serve(0.25)

    async def draw() -> list[bool]:
        await asyncio.gather(versions.new.ready.wait(), versions.old.ready.wait())
        return [await dispatcher.router.choose() is new for _ in range(400)]

    met = versions.run(draw())
    numbers = [number for number, is_new in enumerate(met) if is_new]
    assert 40 < len(numbers) < 160
    assert len({after - before for before, after in pairwise(numbers)}) > 4, "never the nth"


@pytest.mark.parametrize("reads", [True, False])
def test_a_stream_that_breaks_off_counts_as_failed_whether_its_client_reads_or_not(
    versions: Versions, tmp_path: Path, reads: bool
) -> None:
    dispatcher, *_ = versions.serve(settings=CUT_SHORT.model_copy(update={"body_timeout": 0.5}))
    body = {"prompt": "The valve", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
    asked: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode()}]
    sent = b""

    async def receive() -> Message:
        while not asked:
            await asyncio.sleep(WAIT_SECONDS)
        return asked.pop()

    async def send(message: Message) -> None:
        nonlocal sent
        if message["type"] == "http.response.body":
            sent += message["body"]
            await asyncio.sleep(0 if reads else WAIT_SECONDS)

    async def ask() -> str:
        await build_app(dispatcher, tmp_path)(scope | {"headers": headers}, receive, send)
        return dispatcher.metrics.render([])

    (line,) = [
        one for one in versions.run(ask()).splitlines() if one.startswith("serving_requests_total{")
    ]
    assert 'status="504"' in line and line.endswith(" 1.0")
    assert (b"after 3 s" in sent) == reads


def test_metrics_have_one_line_for_a_version_and_none_for_one_that_is_gone() -> None:
    common = {"fingerprint": "", "engine_pid": None}
    engines = [
        RouteStatus(version="7", ready=True, share=0.9, restarts=1, **common),
        RouteStatus(version="7", ready=False, share=0.1, restarts=0, **common),
        RouteStatus(version="8", ready=True, share=0.0, restarts=0, **common),
    ]
    metrics = Metrics()
    text = metrics.render(engines)
    assert text.count('serving_engine_ready{version="7"}') == 1
    assert 'serving_engine_ready{version="7"} 1' in text
    assert 'serving_traffic_share{version="7"} 1' in text
    assert 'serving_engine_restarts_total{version="7"} 1' in text
    assert 'serving_traffic_share{version="8"} 0' in text
    assert 'version="7"' not in metrics.render([])
