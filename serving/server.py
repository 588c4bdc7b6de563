"""One front process: listens, serves the wanted version, and follows when another is wanted."""

import asyncio
import os
import signal
import socket
import traceback
from pathlib import Path

import uvicorn

from artifacts.errors import UserError
from artifacts.leases.holder import process_started
from serving.api.address import bearer_token, listen
from serving.api.admission import MAX_HEADER_BYTES, limited_protocol
from serving.api.app import build_app
from serving.api.dispatcher import Gateway
from serving.api.guard import Front
from serving.api.router import Router
from serving.engine.process import EngineProcess
from serving.rollout import RolledBack, roll_out
from serving.state import (
    Desired,
    Outcome,
    Phase,
    RouteStatus,
    StateFolder,
    Status,
)
from serving.telemetry import Metrics, log
from serving.traffic import EngineTraffic

SHUTDOWN_SECONDS = 10


class Server:
    """The front of one state folder."""

    def __init__(self, state: StateFolder, desired: Desired) -> None:
        self._state = state
        self._desired = desired
        self._router = Router()
        self._gateway = Gateway(self._router, desired.settings, Metrics())
        before = state.read_status()
        self._after_crash = before is not None and before.phase not in ("stopped", "failed")
        self._outcome: Outcome | None = None
        self._phase: Phase = "starting"
        self._changed = asyncio.Event()
        self._address = ("", 0)

    async def run(self, listener: socket.socket, token: str | None) -> int:
        """Serve until asked to stop; returns the exit code."""
        self._address = listener.getsockname()[:2]
        server = uvicorn.Server(
            uvicorn.Config(
                build_app(Front(self._gateway, token)),
                log_level="warning",
                access_log=False,
                lifespan="off",
                http=limited_protocol(self._desired.settings),
                ws="none",
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
                server_header=False,
            )
        )
        self._write_status()
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._changed.set)
        following = asyncio.create_task(self._follow())
        await asyncio.wait([serving, following], return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
        failed = following.done() and not following.cancelled()
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        for route in self._router.routes:
            await route.engine.stop()
        if not failed:
            self._phase = "stopped"
            self._write_status()
        return 1 if failed else 0

    async def _follow(self) -> None:
        """Bring the wanted version up, again whenever another is wanted.

        Returns where the first version cannot be served at all; later failures leave the one before
        in its place.
        """
        wanted, good = self._desired, self._state.read_good()
        if self._after_crash and good and good != wanted:
            # The front before this one ended while it changed versions. What was good then comes
            # first, so that a wanted version that cannot serve costs no outage.
            await self._change(good)
        await self._change(wanted)
        while self._router.routes:
            await self._changed.wait()
            self._changed.clear()
            changed = self._state.read_desired()
            if changed and changed != self._desired:
                await self._change(changed)

    async def _change(self, wanted: Desired) -> None:
        """Serve what is wanted, by the engine that serves already where that is the right one."""
        routes = self._router.routes
        fits = any(r.share == 1.0 and wanted.fits_engine_of(r.engine.desired) for r in routes)
        fault = None if fits else await self._roll_out(wanted)
        if fault is None:
            self._desired = wanted
            self._gateway.settings = wanted.settings
            for route in routes:
                route.engine.desired = wanted
            self._note_good(wanted)
        self._outcome = Outcome(
            version=wanted.version,
            fingerprint=wanted.fingerprint,
            succeeded=fault is None,
            reason=fault or "serving",
        )
        self._phase = "serving" if routes else "failed"
        log("rollout", version=wanted.version, succeeded=fault is None, reason=fault or "serving")
        self._write_status()

    async def _roll_out(self, wanted: Desired) -> str | None:
        """Start an engine and give it the traffic; returns why the one before still has it."""
        log_path = self._state.folder / f"engine-{wanted.version}.log"
        engine = EngineProcess(wanted, log_path, self._write_status)
        self._phase = "rolling_out" if self._router.routes else "starting"
        self._write_status()
        traffic = EngineTraffic(self._router, engine, wanted.settings)
        seconds = wanted.settings.request_timeout
        try:
            await roll_out(traffic, wanted.settings.rollout, seconds, self._report)
        except RolledBack as error:
            return str(error)
        except Exception as error:
            # A fault in moving the traffic must not end what has it.
            log("rollout_fault", version=wanted.version, traceback=traceback.format_exc())
            return f"an unforeseen fault, which the log shows whole: {error!r}"
        return None

    def _note_good(self, wanted: Desired) -> None:
        try:
            self._state.write_good(wanted)
        except (OSError, UserError) as error:
            log("state_not_written", reason=str(error))

    def _report(self, line: str) -> None:
        log("rollout_step", text=line)
        self._write_status()

    def _write_status(self) -> None:
        routes = [
            RouteStatus(
                version=route.engine.desired.version,
                fingerprint=route.engine.desired.fingerprint,
                share=route.share,
                engine_pid=route.engine.pid,
                engine_port=route.engine.port,
                ready=route.engine.ready.is_set(),
                restarts=route.engine.restarts,
                engine=route.engine.engine,
            )
            for route in self._router.routes
        ]
        status = Status(
            pid=os.getpid(),
            process_started=process_started(os.getpid()),
            host=self._address[0],
            port=self._address[1],
            settings=self._gateway.settings,
            phase=self._phase,
            routes=routes,
            outcome=self._outcome,
        )
        try:
            self._state.write_status(status)
        except (OSError, UserError) as error:
            # A full disk must not end the serving; the status is late, not wrong for ever.
            log("status_not_written", reason=str(error))


def serve(folder: Path) -> int:
    """Serve what a state folder wants, until a signal; raises UserError where it cannot begin."""
    state = StateFolder(folder)
    desired = state.read_desired()
    if desired is None:
        raise UserError(f"{folder} does not say what to serve: it has no desired.json.")
    token = bearer_token(desired.settings)
    with listen(desired.settings.host, desired.settings.port) as listener:
        return asyncio.run(_run(state, desired, listener, token))


async def _run(
    state: StateFolder, desired: Desired, listener: socket.socket, token: str | None
) -> int:
    return await Server(state, desired).run(listener, token)
