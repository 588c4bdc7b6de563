"""Starts an engine as a child, talks to it, and starts it again when it dies."""

import asyncio
import errno
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

import httpx

from artifacts.errors import UserError
from artifacts.model.folder import check_model_folder
from artifacts.program.lifetime import PARENT_VARIABLE
from artifacts.reasons import chain
from serving.comparison import Comparison
from serving.engine.protocol import SECRET_VARIABLE, Chunk, GenerateRequest, Refused
from serving.logs import log, make_room, tail
from serving.state import Desired, restart_pause

HEALTH_SECONDS = 1.0
SILENT_SECONDS = 3.0
"""Without an answer to the health check, after which an engine no longer counts as healthy."""
FULL_TABLES = (errno.EMFILE, errno.ENFILE)
STOP_SECONDS = 5.0
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Waiting threads spin for a moment, then sleep. Sleeping at once costs a third of the speed on
    # a quiet machine; spinning on costs nearly all of it beside other work, such as a training run.
    "GOMP_SPINCOUNT": "10000",
    # One heap for all threads: of several, what one thread has freed is of no use to another.
    "MALLOC_ARENA_MAX": "1",
}


class EngineLost(Exception):
    """The engine died or broke before its answer was complete."""


class EngineProcess:
    """One version's engine: at most one child process at a time."""

    def __init__(self, desired: Desired, log_path: Path, on_change: Callable[[], None]) -> None:
        """Nothing is started yet.

        Args:
            desired: the model to load.
            log_path: the child's error output is appended to it.
            on_change: called when the engine becomes ready or is lost.
        """
        self.desired = desired
        self.ready = asyncio.Event()
        self.silent = False
        """Whether the health check has waited for an answer for a while."""
        self.restarts = 0
        self.pid: int | None = None
        self.port: int | None = None
        self.engine = ""
        """Which one computes, and why that one."""
        self.comparison: Comparison | None = None
        """Of its bits with the evaluation's, once made."""
        self._log_path = log_path
        self._conversions = desired.conversions or log_path.parent / "conversions"
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._client: httpx.AsyncClient | None = None
        self._heard = 0.0
        """When a piece of an answer came last."""
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model and wait until it answers; from then on keep it alive.

        Raises:
            UserError: it ended, or was not ready in time; the end of its log is in the message.
        """
        check_model_folder(self.desired.model_folder)
        try:
            await asyncio.wait_for(self._spawn(), self.desired.settings.start_timeout)
        except TimeoutError:
            await self._kill()
            raise UserError(
                f"The engine of version {self.desired.version} was not ready after "
                f"{self.desired.settings.start_timeout:.0f} s (`endpoint.start_timeout`). Its log: "
                f"{self._log_path}"
            ) from None
        self._keeper = asyncio.create_task(self._keep_alive())

    async def stop(self) -> None:
        """End the child."""
        if self._keeper:
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        await self._kill()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Yield the answer as it is written.

        Raises:
            Refused: the request can never be served by this model.
            EngineLost: the engine ended before the answer did.
        """
        if self._client is None or not self.ready.is_set():
            raise EngineLost("the engine is not ready")
        complete = False
        try:
            async with self._client.stream(
                "POST", "/generate", content=request.model_dump_json()
            ) as response:
                if response.status_code == 400:
                    raise Refused(**json.loads(await response.aread()))
                if response.status_code != 200:
                    raise EngineLost(f"the engine answered {response.status_code}")
                async for line in response.aiter_lines():
                    self._heard = monotonic()
                    chunk = Chunk.model_validate_json(line)
                    if chunk.error is not None:
                        raise EngineLost(chunk.error)
                    # Read on past the last one: only then is the connection kept for the next.
                    complete = chunk.finish_reason is not None
                    yield chunk
        except httpx.TransportError as error:
            if not complete:
                raise EngineLost(f"the engine is gone ({type(error).__name__})") from error
        if not complete:
            raise EngineLost("the answer ended early")

    async def _spawn(self) -> None:
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        make_room(self._log_path)
        secret = secrets.token_urlsafe(32)
        with self._log_path.open("ab") as log_file:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "serving.engine.program"),
                *("--model", str(self.desired.model_folder)),
                *("--settings", self.desired.settings.model_dump_json()),
                *("--conversions", str(self._conversions)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=log_file,
                # Ctrl-C in a terminal must not reach the engine before the API server.
                start_new_session=True,
                env=os.environ
                | ENGINE_ENVIRONMENT
                | {SECRET_VARIABLE: secret, PARENT_VARIABLE: str(os.getpid())},
            )
        self.pid = self._process.pid
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            with suppress(ValueError, TypeError, KeyError):
                said = json.loads(line)
                self.port, self.engine = int(said["port"]), str(said["engine"])
                break
        else:
            await self._process.wait()
            raise UserError(
                f"The engine of version {self.desired.version} ended with exit code "
                f"{self._process.returncode} while it loaded {self.desired.model_folder}:\n"
                f"{tail(self._log_path)}"
            )
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {secret}"}
        self._client = engine_client(self.port, **headers)
        log("engine_ready", version=self.desired.version, engine=self.engine)
        self.ready.set()
        self._on_change()

    async def _keep_alive(self) -> None:
        while True:
            await self._until_broken()
            self.ready.clear()
            self._on_change()
            assert self._process is not None
            status = self._process.returncode
            # One that was killed had no time for last words.
            said = {"said": tail(self._log_path, 1)} if status and status > 0 else {}
            log("engine_ended", version=self.desired.version, status=status, **said)
            pause = restart_pause(self.restarts)
            self.restarts += 1
            await asyncio.sleep(pause)
            try:
                await asyncio.wait_for(self._spawn(), self.desired.settings.start_timeout)
                log("engine_restarted", version=self.desired.version, restarts=self.restarts)
            except (UserError, TimeoutError, OSError) as error:
                log("engine_not_restarted", version=self.desired.version, reason=str(error))
                await self._kill()

    async def _until_broken(self) -> None:
        """Wait until the child ends, or end it when it no longer answers."""
        assert self._process is not None
        ended = asyncio.create_task(self._process.wait())
        check = None
        try:
            while not (await asyncio.wait([ended], timeout=HEALTH_SECONDS))[0]:
                check = asyncio.create_task(self._answers())
                self.silent = not (await asyncio.wait([check], timeout=SILENT_SECONDS))[0]
                if not await check:
                    # It may have ended by itself during the check. `Process.kill` would ask for its
                    # exit code then, and so take it from whoever waits for it.
                    with suppress(ProcessLookupError):
                        os.kill(self._process.pid, signal.SIGKILL)
                self.silent = False
        finally:
            self.silent = False
            ended.cancel()
            if check is not None:
                check.cancel()

    async def _answers(self) -> bool:
        assert self._client is not None
        began = monotonic()
        try:
            answer = await self._client.get("/health", timeout=self.desired.settings.engine_timeout)
        except httpx.TimeoutException:
            # One that writes is slow, or the machine is: it does not stand still.
            return self._heard > began
        except httpx.HTTPError as error:
            # Too many open files here say nothing about the engine.
            return any(getattr(one, "errno", None) in FULL_TABLES for one in chain(error))
        return answer.status_code == 200

    async def _kill(self) -> None:
        self.ready.clear()
        if self._client:
            await self._client.aclose()
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()


def engine_client(port: int, **headers: str) -> httpx.AsyncClient:
    """A client of an engine, which waits for its answers as long as they take."""
    return httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}",
        headers=headers,
        timeout=httpx.Timeout(None, connect=5.0),
        # Any number, kept for less than uvicorn keeps them: none is closed as it is used again.
        limits=httpx.Limits(keepalive_expiry=2.0),
        trust_env=False,
    )
