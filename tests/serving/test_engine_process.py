"""An engine's end is noticed and counted, and its keeper starts it again."""

import asyncio
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from serving.api import dispatcher
from serving.api.dispatcher import Dispatcher, Stream
from serving.api.metrics import Metrics
from serving.api.router import Route, Router
from serving.engine import process as engine_process
from serving.engine.process import EngineProcess
from serving.engine.protocol import GenerateRequest
from serving.evidence import Seen
from serving.state import Desired
from serving.traffic import probe
from tests.faults import stopped
from tests.serving.conftest import SETTINGS
from tests.tiny import change_config

KILLS = 1
ANSWERS = EngineProcess._answers


def _desired(model: Path) -> Desired:
    return Desired(model_folder=model, version="1", fingerprint="1", settings=SETTINGS)


async def answers_late(engine: EngineProcess) -> bool:
    """The health check, as when the machine is so busy that the engine's end is noticed first."""
    healthy = await ANSWERS(engine)
    while not healthy and engine._process and engine._process.returncode is None:
        await asyncio.sleep(0.01)
    return healthy


class LateHealth(httpx.AsyncHTTPTransport):
    """To an engine that does not come to answer its health check, for as long as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.given_up = asyncio.Event(), asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path != "/health":
            return await super().handle_async_request(request)
        self.asked.set()
        await self.given_up.wait()
        self.given_up.clear()
        raise httpx.ReadTimeout("late")


def test_engine_that_writes_is_alive_whatever_its_health_check_says(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "HEALTH_SECONDS", 0.01)
    request = GenerateRequest(prompt="The", max_tokens=8, max_prompt_tokens=8)

    async def write_during_two_checks_and_no_more() -> None:
        engine = EngineProcess(_desired(tiny_model_folder), tmp_path / "engine.log", lambda: None)
        await engine.start()
        pid, slow = engine.pid, LateHealth()
        assert engine._client is not None
        engine._client._transport = slow
        for _ in range(2):
            await slow.asked.wait()
            assert [chunk async for chunk in engine.generate(request)]
            slow.asked.clear()
            slow.given_up.set()
        assert (engine.pid, engine.restarts) == (pid, 0)
        async with asyncio.timeout(60):
            while engine.pid == pid:
                slow.given_up.set()
                await asyncio.sleep(0.01)
        await engine.stop()

    asyncio.run(write_during_two_checks_and_no_more())


def test_engine_killed_while_its_health_is_checked_is_started_again(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "HEALTH_SECONDS", 0.1)
    monkeypatch.setattr(EngineProcess, "_answers", answers_late)

    async def kill_in_checks() -> None:
        engine = EngineProcess(_desired(tiny_model_folder), tmp_path / "engine.log", lambda: None)
        await engine.start()
        for _ in range(KILLS):
            assert engine.pid is not None
            process = psutil.Process(engine.pid)
            # A suspended engine leaves the check without an answer until it is killed.
            process.suspend()
            await asyncio.sleep(0.5)
            process.kill()
            async with asyncio.timeout(60):
                while engine.pid == process.pid or not engine.ready.is_set():
                    await asyncio.sleep(0.1)
            await probe(engine, SETTINGS)
        assert engine.restarts == KILLS
        await engine.stop()

    asyncio.run(kill_in_checks())


def test_connections_to_an_engine_are_kept_for_the_next_requests(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    async def ask_at_once() -> int:
        engine = EngineProcess(_desired(tiny_model_folder), tmp_path / "engine.log", lambda: None)
        await engine.start()
        await asyncio.gather(*(probe(engine, SETTINGS) for _ in range(4)))
        connections = psutil.Process(engine.pid).net_connections("tcp")
        kept = [one for one in connections if one.status == psutil.CONN_ESTABLISHED]
        await engine.stop()
        return len(kept)

    assert asyncio.run(ask_at_once()) >= 4


def test_a_full_table_of_open_files_says_nothing_about_the_engine(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "HEALTH_SECONDS", 0.1)

    async def check_without_files() -> None:
        engine = EngineProcess(_desired(tiny_model_folder), tmp_path / "engine.log", lambda: None)
        await engine.start()
        before, process = engine._client, engine.pid
        assert before is not None
        # Each check needs a connection of its own, as after a pause.
        engine._client = httpx.AsyncClient(base_url=before.base_url, headers=before.headers)
        with no_more_files():
            with pytest.raises(OSError, match="Too many open files"):
                os.open("/dev/null", os.O_RDONLY)
            await asyncio.sleep(1)
        await probe(engine, SETTINGS)
        assert (engine.pid, engine.restarts) == (process, 0)
        await before.aclose()
        await engine.stop()

    asyncio.run(check_without_files())


@contextmanager
def no_more_files() -> Iterator[None]:
    """No file can be opened in this process while the block runs."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_answer_that_stops_counts_as_failed_though_its_client_leaves(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatcher, "STALL_SECONDS", 0.2)
    # Long, so that no engine has written it all before it is stopped.
    folder = change_config(tiny_model_folder, tmp_path / "model", max_position_embeddings=4_096)
    request = GenerateRequest(
        prompt="The valve",
        max_tokens=4_000,
        max_prompt_tokens=80,
        ignore_eos=True,
    )

    async def leave_after(pause: float, route: Route) -> Seen:
        """Begin to read an answer from an engine that then stands still; go after a while."""
        router = Router()
        router.routes.append(route)
        answer = await Dispatcher(router, SETTINGS, Metrics()).stream(request)
        assert route.engine.pid is not None
        with stopped(route.engine.pid):
            reading = asyncio.create_task(_read(answer))
            await asyncio.sleep(pause)
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
        return route.look()

    async def try_both() -> tuple[Seen, Seen]:
        engine = EngineProcess(_desired(folder), tmp_path / "engine.log", lambda: None)
        await engine.start()
        route = Route(engine, 1.0)
        seen = await leave_after(0.0, route), await leave_after(1.0, route)
        await engine.stop()
        return seen

    at_once, late = asyncio.run(try_both())
    assert (at_once.answered, at_once.failed) == (0, 0), "it says nothing about the engine"
    assert (late.answered, late.failed) == (0, 1)


async def _read(answer: Stream) -> None:
    async for _ in answer.chunks:
        pass
