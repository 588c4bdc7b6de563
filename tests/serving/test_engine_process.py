"""An engine's end is noticed and counted, and its keeper starts it again."""

import asyncio
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from artifacts.leases import process_started
from serving import logs
from serving.api.dispatcher import Router
from serving.engine import process as engine_process
from serving.engine.process import EngineProcess
from serving.engine.protocol import Channel, EngineLost, GenerateRequest
from serving.rollout import CanaryFailed
from serving.settings import OpenAIEngine
from serving.traffic import EngineTraffic, probe
from tests.serving.conftest import SETTINGS, desired, in_event_loop
from tests.waiting import WAIT_SECONDS, wait_until

SERVER = (sys.executable, "-m", "tests.stand_ins.openai_without_echo", "{port}")
REQUEST = GenerateRequest(prompt="The", max_tokens=8, max_prompt_tokens=8)


def scripted(place: Path, lines: str) -> OpenAIEngine:
    """A server that a script starts."""
    (place / "run.sh").write_text(lines.replace("SERVER", shlex.join(SERVER[:-1])))
    return OpenAIEngine(command=("sh", str(place / "run.sh"), "{port}"))


def engine_of(model: Path, place: Path, **changes: object) -> EngineProcess:
    return EngineProcess(desired(model, **changes), place / "engine.log")


@asynccontextmanager
async def started(model: Path, place: Path, **changes: object) -> AsyncIterator[EngineProcess]:
    engine = engine_of(model, place, **changes)
    await engine.start()
    yield engine
    await engine.stop()


async def replaced(engine: EngineProcess, before: psutil.Process) -> None:
    """Return once another process serves, which writes."""
    async with asyncio.timeout(WAIT_SECONDS):
        while engine.pid == before.pid or not engine.ready.is_set():
            await asyncio.sleep(0.1)
    await probe(engine, SETTINGS)


@in_event_loop
async def test_engine_that_writes_is_alive_whatever_its_health_check_says(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "HEALTH_SECONDS", 0.01)
    asked, given_up = asyncio.Event(), asyncio.Event()

    async def answer_no_check(_: Channel) -> None:
        asked.set()
        await given_up.wait()
        given_up.clear()
        raise TimeoutError

    async with started(tiny_model_folder, tmp_path) as engine:
        pid = engine.pid
        monkeypatch.setattr(Channel, "check", answer_no_check)
        for _ in range(2):
            await asked.wait()
            assert [chunk async for chunk in engine.generate(REQUEST)]
            asked.clear()
            given_up.set()
        assert (engine.pid, engine.restarts) == (pid, 0)
        async with asyncio.timeout(WAIT_SECONDS):
            while engine.pid == pid:
                given_up.set()
                await asyncio.sleep(0.01)


@in_event_loop
async def test_engine_killed_while_its_health_is_checked_is_started_again(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "HEALTH_SECONDS", 0.1)
    async with started(tiny_model_folder, tmp_path) as engine:
        process = psutil.Process(engine.pid)
        # A suspended engine leaves the check without an answer until it is killed.
        process.suspend()
        await asyncio.sleep(0.5)
        process.kill()
        await replaced(engine, process)
        assert engine.restarts == 1


@pytest.mark.fault("endpoint", "engine hangs", sees="a pause", then="the engine is replaced")
@in_event_loop
async def test_engine_that_stands_still_for_good_is_replaced(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One whose threads wait for each other, for which it makes no difference to be told on."""
    monkeypatch.setattr(engine_process, "CONTINUE_SECONDS", 1_000)
    async with started(tiny_model_folder, tmp_path, engine_timeout=3.0) as engine:
        still = psutil.Process(engine.pid)
        still.suspend()
        answer = asyncio.create_task(anext(engine.generate(REQUEST)))
        await replaced(engine, still)
        with pytest.raises(EngineLost, match=r"not answer for 3 s \(`endpoint.engine_timeout`\)"):
            await answer
    assert not still.is_running()


@in_event_loop
async def test_the_log_of_a_server_that_says_much_has_a_bounded_size(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "MAX_BYTES", 2_000)
    monkeypatch.setattr(engine_process, "HEALTH_SECONDS", 0.1)
    log_path = tmp_path / "engine.log"
    full = logs.before(log_path)
    engine = scripted(
        tmp_path,
        """(while sleep 0.01; do echo one of many lines; done) &
        exec SERVER $1""",
    )
    async with started(tiny_model_folder, tmp_path, engine=engine), asyncio.timeout(60):
        for _ in range(2):
            while not full.exists() or log_path.stat().st_size >= logs.MAX_BYTES:
                await asyncio.sleep(0.01)
            assert "one of many lines" in full.read_text()
            full.unlink()


@in_event_loop
async def test_a_dead_server_whose_process_lives_is_replaced_while_clients_ask(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    """Each request ends with an error, which is no sign of life."""
    engine = scripted(
        tmp_path,
        f"""SERVER $1 &
        echo $! > {tmp_path}/server
        exec sleep 1000""",
    )
    async with started(tiny_model_folder, tmp_path, engine=engine, engine_timeout=3.0) as one:
        before = psutil.Process(one.pid)
        asking = asyncio.create_task(ask_again_and_again(one))
        os.kill(int((tmp_path / "server").read_text()), signal.SIGKILL)
        await replaced(one, before)
        asking.cancel()


@in_event_loop
async def test_what_a_server_leaves_behind_keeps_no_engine_ready_though_the_log_is_gone(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    """Its program goes on for as long as that takes to end, and takes no request meanwhile."""
    engine = scripted(
        tmp_path,
        """sh -c 'trap "sleep 4; exit" TERM; while :; do sleep 0.1; done' &
        exec SERVER $1""",
    )
    async with started(tiny_model_folder, tmp_path, engine=engine) as one:
        (tmp_path / "engine.log").unlink()
        program = psutil.Process(one.pid)
        (server,) = (each for each in program.children() if SERVER[2] in each.cmdline())
        server.kill()
        async with asyncio.timeout(WAIT_SECONDS):
            while one.ready.is_set():
                await asyncio.sleep(0.05)
        assert program.is_running(), "what was left behind has not ended"
        await replaced(one, program)


async def ask_again_and_again(engine: EngineProcess) -> None:
    while True:
        with suppress(EngineLost):
            await anext(engine.generate(REQUEST))
        await asyncio.sleep(0.1)


@in_event_loop
async def test_a_server_that_stands_still_is_replaced_by_the_setting_of_now(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    engine = OpenAIEngine(command=SERVER)
    async with started(tiny_model_folder, tmp_path, engine=engine, engine_timeout=1_000.0) as one:
        settings = one.desired.settings.model_copy(update={"engine_timeout": 3.0})
        one.desired = one.desired.model_copy(update={"settings": settings})
        before = psutil.Process(one.pid)
        (server,) = before.children()
        server.suspend()
        asking = asyncio.create_task(ask_again_and_again(one))
        await replaced(one, before)
        asking.cancel()
    # Whoever takes in orphans may leave them as zombies.
    wait_until(lambda: process_started(server.pid) is None)


@pytest.mark.parametrize(
    "command",
    [("sh", "{script}", "{port}"), ("sh", "-c", "sh {script} {port}; true")],
    ids=["itself", "from a shell that forwards no signal"],
)
@in_event_loop
async def test_a_container_that_a_script_has_started_is_stopped_with_its_version(
    tiny_model_folder: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """The container has a session of its own and ignores the signal; the script has it end."""
    script = tmp_path / "run.sh"
    script.write_text(
        f"""trap 'sleep 1; kill -9 $container; echo stopped > {tmp_path}/said; exit' TERM
        setsid sh -c 'trap "" TERM; exec {shlex.join(SERVER[:-1])} $0' $1 &
        container=$!
        echo $container > {tmp_path}/container
        wait"""
    )
    words = tuple(word.replace("{script}", str(script)) for word in command)
    async with started(tiny_model_folder, tmp_path, engine=OpenAIEngine(command=words)):
        container = psutil.Process(int((tmp_path / "container").read_text()))
    assert (tmp_path / "said").read_text() == "stopped\n"
    wait_until(lambda: process_started(container.pid) is None)


@in_event_loop
async def test_a_new_engine_that_ends_at_its_first_request_leaves_its_last_words(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    log_path = tmp_path / "engine.log"
    log_path.write_text("could not create a primitive descriptor\n")
    engine = engine_of(tiny_model_folder, tmp_path)

    async def end_when_ready() -> None:
        await engine.ready.wait()
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)

    ending = asyncio.create_task(end_when_ready())
    with pytest.raises(CanaryFailed, match=rf"(?s){log_path}.*could not create a primitive"):
        await EngineTraffic(Router(), engine, SETTINGS).start()
    await asyncio.gather(ending, engine.stop())
