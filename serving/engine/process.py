"""Starts an engine as a child, and starts it again when it dies or stands still."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from time import monotonic
from typing import Any

from artifacts.errors import UserError
from artifacts.model import INPUT_PREFIX, check_model_folder, read_generation_config
from artifacts.program.lifetime import Child, how_it_ended
from serving.comparison import EngineComparison
from serving.engine import protocol
from serving.logs import log, make_room, tail
from serving.state import STEADY_SECONDS, Desired, restart_pause

HEALTH_SECONDS = 1.0
"""Between two health checks."""
CONTINUE_SECONDS = 1.0
"""An engine that has not answered its health check for so long is told to go on (SIGCONT),
repeatedly."""
STOP_SECONDS = 10.0
"""Longer than an engine gives what a command has started, such as a container."""
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Waiting threads spin for a moment, then sleep. Sleeping at once costs a third of the speed on
    # a quiet machine; spinning on costs nearly all of it beside other work, such as a training run.
    "GOMP_SPINCOUNT": "10000",
    # One heap for all threads, 43 MB less: of several, what one thread has freed is of no use to
    # another.
    "MALLOC_ARENA_MAX": "1",
}


class EngineProcess:
    """One version's engine: at most one child process at a time."""

    def __init__(
        self, desired: Desired, log_path: Path | None, on_change: Callable[[], None] = lambda: None
    ) -> None:
        """Nothing is started yet.

        Args:
            desired: the model to load.
            log_path: what the child says is appended to it; None leaves that where this process
                writes, and takes the conversions' folder from `desired`.
            on_change: called when the engine becomes ready or is lost.
        """
        self.desired = desired
        self.ready = asyncio.Event()
        self.restarts = 0
        self.engine = ""
        """Which one computes, and why that one."""
        self.comparison: EngineComparison | None = None
        """Of its bits with the evaluation's, once made."""
        self.log_path = log_path
        self._on_change = on_change
        self._child: Child | None = None
        self._channel: protocol.Channel | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Of the newest child."""
        return self._child.pid if self._child else None

    async def start(self) -> None:
        """Load the model and wait until it answers; from then on keep it alive.

        Raises:
            UserError: it ended, or was not ready in time; the end of its log is in the message.
        """
        check_model_folder(self.desired.model_folder)
        try:
            async with asyncio.timeout(self.desired.settings.start_timeout):
                await self._spawn()
        except TimeoutError:
            await self._end()
            raise UserError(
                f"The engine of version {self.desired.version} was not ready after "
                f"{self.desired.settings.start_timeout:.0f} s (`endpoint.start_timeout`)."
                f"{self.last_words()}"
            ) from None
        self._keeper = asyncio.create_task(self._keep_alive())

    async def stop(self) -> None:
        """End the child."""
        if self._keeper:
            # First, or it would take the end for a death and start another engine.
            self._keeper.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeper
        await self._end()

    def as_judged(self, request: protocol.GenerateRequest) -> protocol.GenerateRequest:
        """A request with the version's own prefix and length, where it asks for them."""
        prefix, changes = self._taught.get(INPUT_PREFIX), dict[str, Any]()
        if prefix is None:
            return request
        # A client that writes the prefix itself does not get it twice.
        if request.is_input and not str(request.prompt).startswith(prefix):
            changes["prompt"] = f"{prefix}{request.prompt}"
        if request.own_length and "max_new_tokens" in self._taught:
            most = self.desired.settings.max_new_tokens
            changes["max_tokens"] = min(self._taught["max_new_tokens"], most)
        return request.model_copy(update=changes)

    @cached_property
    def _taught(self) -> dict[str, Any]:
        return read_generation_config(self.desired.model_folder)

    def generate(self, request: protocol.GenerateRequest) -> AsyncGenerator[protocol.Chunk, None]:
        """The answer as it is written, see `Channel.generate`; raises EngineLost."""
        if self._channel is None or not self.ready.is_set():
            raise protocol.EngineLost("the engine is not ready")
        return self._channel.generate(request)

    def last_words(self) -> str:
        """The end of its log, and where that lies, for a message about its end."""
        if self.log_path is None or not self.log_path.exists():
            return ""
        return f" The end of its log ({self.log_path}):\n{tail(self.log_path)}"

    async def _spawn(self) -> None:
        # Clients' token is the API server's alone.
        token_variable = self.desired.settings.token_variable
        variables = {name: value for name, value in os.environ.items() if name != token_variable}
        conversions = self.desired.conversions
        if conversions is None:
            assert self.log_path is not None
            conversions = self.log_path.parent / "conversions"
        end, engines_end = socket.socketpair()
        with ExitStack() as opened:
            # Only the child keeps this end open, so that the channel closes when it dies.
            opened.enter_context(engines_end)
            output = None
            if self.log_path is not None:
                self.log_path.parent.mkdir(parents=True, exist_ok=True)
                make_room(self.log_path)
                output = opened.enter_context(self.log_path.open("ab"))
            self._child = Child(
                [
                    *(sys.executable, "-m", "serving.engine.program"),
                    *("--model", str(self.desired.model_folder)),
                    *("--settings", self.desired.settings.model_dump_json()),
                    *("--conversions", str(conversions)),
                    *("--channel", str(engines_end.fileno())),
                ],
                environment=variables | ENGINE_ENVIRONMENT,
                output=output,
                descriptors=[engines_end.fileno()],
            )
        self._channel = protocol.Channel(
            *await asyncio.open_connection(sock=end, limit=protocol.LONGEST_LINE)
        )
        try:
            self.engine = await self._channel.check()
        except protocol.EngineLost:
            code = await self._end()
            raise UserError(
                f"The engine of version {self.desired.version} {how_it_ended(code)} while it "
                f"loaded {self.desired.model_folder}.{self.last_words()}"
            ) from None
        log("engine_ready", version=self.desired.version, engine=self.engine)
        self.ready.set()
        self._on_change()

    async def _keep_alive(self) -> None:
        deaths = 0
        while True:
            began = monotonic()
            status = await self._until_broken()
            deaths = 0 if monotonic() - began > STEADY_SECONDS else deaths
            # One that was killed had no time for last words.
            fields = {"said": tail(self.log_path, 1)} if status > 0 and self.log_path else {}
            if self._channel and self._channel.why_ended != protocol.ENDED:
                fields = {"reason": self._channel.why_ended}
            log("engine_ended", version=self.desired.version, status=status, **fields)
            await asyncio.sleep(restart_pause(deaths))
            deaths += 1
            try:
                # Until Python 3.12 `wait_for` forgets that it was canceled where what it waits for
                # ends at that moment, and then nobody could stop this.
                async with asyncio.timeout(self.desired.settings.start_timeout):
                    await self._spawn()
                log("engine_restarted", version=self.desired.version, restarts=self.restarts)
            except (UserError, TimeoutError, OSError) as error:
                log("engine_not_restarted", version=self.desired.version, reason=str(error))
                # The next turn finds the channel ended at once, so it counts as one more death, and
                # the pause before the next try grows.
                await self._end()

    async def _until_broken(self) -> int:
        """Wait until the child ends, or end it when it no longer answers; returns its exit code.

        One that was stopped goes on when it is told to, and to any other that makes no difference:
        so nobody has to find out whether it is slow, on a busy machine, or stands still.
        """
        assert self._child is not None and self._channel is not None
        while not (await asyncio.wait([self._channel.ended], timeout=HEALTH_SECONDS))[0]:
            if self.log_path:
                # What a command has started may say something of each request.
                await asyncio.to_thread(make_room, self.log_path, is_open=True)
            check = asyncio.create_task(self._answers())
            try:
                while not (await asyncio.wait([check], timeout=CONTINUE_SECONDS))[0]:
                    self._child.signal(signal.SIGCONT)
                if not await check:
                    break
            finally:
                check.cancel()
        # Before the end, which may take some seconds: the death counts from now on.
        self.ready.clear()
        self.restarts += 1
        self._on_change()
        return await self._end()

    async def _answers(self) -> bool:
        assert self._channel is not None
        began, limit = monotonic(), self.desired.settings.engine_timeout
        try:
            async with asyncio.timeout(limit):
                await self._channel.check()
        except TimeoutError:
            # One that writes is slow, or the machine is: it does not stand still.
            if self._channel.heard > began:
                return True
            why = f"the engine did not answer for {limit:.0f} s (`endpoint.engine_timeout`)"
            self._channel.why_ended = why
            return False
        except protocol.EngineLost:
            return False
        return True

    async def _end(self) -> int:
        """End the child, if it has not ended; returns its exit code."""
        self.ready.clear()
        # Most engines need no signal: one whose channel has ended ends by itself.
        if self._channel:
            self._channel.close()
        return await asyncio.to_thread(self._child.end, STOP_SECONDS) if self._child else 0
