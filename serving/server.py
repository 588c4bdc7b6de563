"""The API server: serves the wanted version, and follows when another is wanted.

Started by its supervisor, which holds the socket: `python -m serving.server --state FOLDER
--listener DESCRIPTOR --beats DESCRIPTOR`.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from artifacts.errors import UserError
from artifacts.leases import process_started
from artifacts.program.lifetime import end_with_parent
from serving.api.app import build_app
from serving.api.dispatcher import Dispatcher
from serving.connections import HttpServer
from serving.engine.process import EngineProcess
from serving.logs import LogHandler, log, log_to, remove_oldest
from serving.rollout import NoLongerWanted, RolledBack, roll_out
from serving.settings import bearer_token
from serving.state import (
    Desired,
    Phase,
    RolloutOutcome,
    State,
    StateFile,
    StateFolder,
    Status,
    code_hash,
)
from serving.supervisor import CANNOT_SERVE
from serving.traffic import EngineTraffic

SHUTDOWN_SECONDS = 10
"""For answers that are under way; their engines end after them."""
BEAT_SECONDS = 1.0
"""Between two signs of life for the supervisor."""
LOOK_SECONDS = 0.1
"""Between two looks whether something else is wanted."""


class Server:
    """The API server of one state folder."""

    def __init__(self, state: StateFolder, beats: int) -> None:
        """Read what is wanted; raises UserError where the state folder does not say it.

        Args:
            beats: the descriptor by which the supervisor is told that all is well, and for how many
                seconds it may hear nothing until the next time.
        """
        self._state, self._beats = state, beats
        # Before it is read: what is written meanwhile is seen as a change.
        self._read_as, desired = state.desired.written(), state.desired.read()
        if desired is None:
            raise UserError(f"{state.folder} does not say what to serve")
        self._desired = desired
        self._token = bearer_token(desired.settings)
        self._dispatcher = Dispatcher(desired.settings)
        self._router = self._dispatcher.router
        before = state.status.read()
        self._supervisor = os.getppid()
        # Only under the same supervisor: once an endpoint has ended, people may have rejected what
        # it served.
        self._has_served = (
            before is not None
            and before.pid == self._supervisor
            and before.alive
            and before.has_served
            and before.phase not in ("stopped", "failed")
        )
        self._outcome: RolloutOutcome | None = None
        self._phase: Phase = "starting"
        self._address = ("", 0)

    async def run(self, listener: socket.socket) -> int:
        """Serve until asked to stop; returns the exit code."""
        self._address = listener.getsockname()[:2]
        server = HttpServer(
            build_app(self._dispatcher, self._state.folder, self._token),
            self._desired.settings,
            log_level="error",
            log_config=None,
            timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        )
        self._write_status()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        beating = asyncio.create_task(self._beat())
        following = asyncio.create_task(self._follow())
        await asyncio.wait([serving, following], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        failed = following.done()
        for task in (following, beating):
            task.cancel()
        await asyncio.gather(following, beating, return_exceptions=True)
        # At once: each may give what a command has started some seconds.
        await asyncio.gather(*(route.engine.stop() for route in self._router.routes))
        if failed:
            following.result()  # Raises what is no version's fault: starting again may help.
        else:
            self._phase = "stopped"
            self._write_status()
        return CANNOT_SERVE if failed else 0

    async def _beat(self) -> None:
        """Show the supervisor that this process answers, and others where it is to be found."""
        while True:
            self._show_life()
            # A network drive that does not answer says nothing about the file.
            with suppress(OSError):
                if not self._state.status.path.exists():
                    self._write_state_again()
            await asyncio.sleep(BEAT_SECONDS)

    def _show_life(self) -> None:
        silence = self._dispatcher.settings.engine_timeout
        with suppress(OSError):
            os.write(self._beats, f"{silence}\n".encode())

    def _write_state_again(self) -> None:
        """The state folder was removed: without it nobody could stop or move this endpoint.

        Where the model went with it, all this belongs to was removed, and the endpoint ends.
        """
        if not self._desired.model_folder.exists():
            log("ended", reason=f"{self._state.folder} and the model were removed")
            os.kill(os.getpid(), signal.SIGTERM)
            return
        log("state_written_again", folder=str(self._state.folder))
        with suppress(OSError, UserError):
            # Unless somebody has asked for another version since the folder was removed.
            if self._state.desired.read() is None:
                self._state.desired.write(self._desired)
            if self._phase == "serving":
                self._state.good.write(self._desired)
        self._write_status()

    async def _follow(self) -> None:
        """Bring the wanted version up, again whenever another is wanted.

        Returns where the first version cannot be served at all; later failures leave the one before
        in its place.
        """
        desired, good = self._desired, self._state.good.read()
        if self._has_served and good and good != desired:
            # The API server before this one ended while it changed versions. What was good then
            # comes first, so that a wanted version that cannot serve costs no outage.
            # Its outcome is not told: where only settings differ, it would be taken for that of the
            # wanted ones.
            await self._change(good, is_asked=False)
        await self._change(desired)
        while self._router.routes:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                if (stamp := self._state.desired.written()) == self._read_as:
                    continue
                changed = self._state.desired.read()
            except OSError:
                continue  # A drive of the network that does not answer says nothing new.
            self._read_as = stamp
            if changed:
                # Also where it serves already: whoever asked waits for the outcome.
                await self._change(changed)

    async def _change(self, desired: Desired, is_asked: bool = True) -> None:
        """Serve what is wanted, by the engine that serves already where that is the right one.

        Args:
            is_asked: whether somebody may wait for the outcome.
        """
        routes = self._router.routes
        fits = any(r.share == 1.0 and desired.engine == r.engine.desired.engine for r in routes)
        try:
            fault = None if fits else await self._roll_out(desired)
        except NoLongerWanted as error:
            # Who asked has given way to another, whose outcome comes with the next change.
            fault, is_asked = str(error), False
        if fault is None:
            self._desired = desired
            self._dispatcher.settings = desired.settings
            # Now, not with the next beat: it may be the silence after it that has to be short.
            self._show_life()
            # An engine's keeper takes its timeouts from here, and an answer the name of its
            # version.
            for route in routes:
                route.engine.desired = desired
            self._has_served = True
            self._keep(self._state.good, desired)
        if is_asked:
            self._outcome = RolloutOutcome(
                version=desired.version,
                fingerprint=desired.fingerprint,
                succeeded=fault is None,
                reason=fault or "serving",
            )
        self._phase = "serving" if routes else "failed"
        log("rollout", version=desired.version, succeeded=fault is None, reason=fault or "serving")
        self._write_status()

    async def _roll_out(self, desired: Desired) -> str | None:
        """Start an engine and give it the traffic; returns why the one before still has it."""
        log_path = self._state.folder / f"engine-{desired.version}.log"
        running = {route.engine.log_path for route in self._router.routes}
        remove_oldest(set(self._state.folder.glob("engine-*.log")) - {log_path, *running})
        engine = EngineProcess(desired, log_path, self._write_status)
        self._phase = "rolling_out" if self._router.routes else "starting"
        self._write_status()
        traffic = EngineTraffic(self._router, engine, desired.settings)
        seconds, is_first = desired.settings.request_timeout, not self._router.routes

        def still_wanted() -> bool:
            # Where nothing serves, nothing else could sooner. Else as the file says, whose reader
            # may have come just before another was wanted.
            with suppress(OSError):
                # None where the state folder was removed: then nobody has asked for another
                # version.
                return is_first or self._state.desired.read() in (desired, None)
            return True

        try:
            await roll_out(traffic, desired.settings.rollout, seconds, self._report, still_wanted)
        except NoLongerWanted:
            raise
        except RolledBack as error:
            return str(error)
        except Exception as error:
            # A fault in moving the traffic must not end what has it.
            log("rollout_fault", version=desired.version, traceback=traceback.format_exc())
            return f"an unexpected error, which the log shows in full: {error!r}"
        return None

    def _report(self, line: str) -> None:
        log("rollout_step", text=line)
        self._write_status()

    def _write_status(self) -> None:
        status = Status(
            pid=self._supervisor,
            process_started=process_started(self._supervisor),
            folder=self._state.folder.absolute(),
            api_server_pid=os.getpid(),
            host=self._address[0],
            port=self._address[1],
            settings=self._dispatcher.settings,
            code=code_hash(),
            phase=self._phase,
            has_served=self._has_served,
            routes=[route.status for route in self._router.routes],
            outcome=self._outcome,
        )
        self._keep(self._state.status, status)

    def _keep(self, file: StateFile[State], content: State) -> None:
        """A full disk must not end the serving; what is told is late then, not wrong for ever."""
        try:
            file.write(content)
        except (OSError, UserError) as error:
            log("state_not_written", file=file.path.name, reason=str(error))


def main() -> int:
    """Serve until a signal; exit code CANNOT_SERVE where starting again is no help."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--beats", type=int, required=True)
    arguments = parser.parse_args()
    # Engines end with this process by themselves, so it need not be asked.
    end_with_parent(signal.SIGKILL)
    state = StateFolder(arguments.state)
    log_to(state.log_path)
    # A supervisor that stands still must not stop the answers.
    os.set_blocking(arguments.beats, False)
    logging.basicConfig(level=logging.WARNING, handlers=[LogHandler()])
    try:
        # An OSError is not caught, so the supervisor starts another server: a drive that does not
        # answer just now may do so then.
        server = Server(state, arguments.beats)
    except UserError as error:
        log("failed", reason=str(error))
        return CANNOT_SERVE
    with socket.socket(fileno=arguments.listener) as listener:
        return asyncio.run(server.run(listener))


if __name__ == "__main__":
    sys.exit(main())
