"""An engine's keeper starts it again, however it ends."""

import asyncio
from pathlib import Path

import psutil
import pytest

from serving.engine import process as engine_process
from serving.engine.process import EngineProcess
from serving.state import Desired
from serving.traffic import probe
from tests.serving.conftest import SETTINGS

KILLS = 1
ANSWERS = EngineProcess._answers


async def answers_late(engine: EngineProcess) -> bool:
    """The health check, as when the machine is so busy that the engine's end is noticed first."""
    healthy = await ANSWERS(engine)
    while not healthy and engine._process and engine._process.returncode is None:
        await asyncio.sleep(0.01)
    return healthy


def test_engine_killed_while_its_health_is_checked_is_started_again(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "HEALTH_SECONDS", 0.1)
    monkeypatch.setattr(EngineProcess, "_answers", answers_late)
    desired = Desired(
        model_folder=tiny_model_folder, version="1", fingerprint="1", settings=SETTINGS
    )

    async def kill_in_checks() -> None:
        engine = EngineProcess(desired, tmp_path / "engine.log", lambda: None)
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
