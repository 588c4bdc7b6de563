"""Starts the endpoint so that it outlives whoever started it, moves it to a version, stops it."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import httpx

from artifacts.errors import UserError
from artifacts.leases import local_lease
from artifacts.program.lifetime import Child, how_it_ended
from artifacts.progress import Report
from artifacts.storage.files import make_private
from serving.logs import tail
from serving.rollout import NoLongerWanted, RolloutFailed
from serving.settings import EndpointSettings, bearer_token, listen
from serving.state import Desired, RouteStatus, StateFolder, Status, code_hash

POLL_SECONDS = 0.05
REPORT_SECONDS = 5.0
STOP_SECONDS = 30.0
"""More than the supervisor gives its API server."""
ASK_SECONDS = 10.0


@dataclass(frozen=True)
class Endpoint:
    """A running endpoint."""

    status: Status
    route: RouteStatus
    """Of the version that was asked for."""
    changed: bool
    """Whether this call changed what is served."""


def start(
    state_folder: Path,
    desired: Desired,
    report: Report = lambda _: None,
    still_wanted: Callable[[], bool] = lambda: True,
) -> Endpoint:
    """Have a version served, whatever is served now, and wait until it is.

    Where the endpoint runs already it is moved without an outage, to another version as to other
    settings; only another address, token, connection limit, list of origins or release of this
    package restarts it.
    Otherwise it is started in a session of its own, so that it stays when the caller ends.

    Args:
        still_wanted: asked once it is this call's turn, and again and again while the endpoint
            moves. Where it says no, this call ends, and the endpoint gives the rollout up as soon
            as it is told what is wanted instead.

    Raises:
        NoLongerWanted: so it was.
        RolloutFailed: the version that was served before still is, or somebody stopped it.
        UserError: the port is taken, the model cannot be loaded, a token is missing.
    """
    change = _Change(StateFolder(state_folder), desired, report, still_wanted)
    state, settings = change.state, desired.settings
    with local_lease(state_folder / "start.lock", lambda who: report(f"waiting for {who}")):
        # Whoever waited, or compared many files before, may come too late.
        if not still_wanted():
            raise NoLongerWanted
        running = state.running
        if running and _needs_new_server(running, settings):
            # Called for its error alone, which has to come while the endpoint is still running.
            bearer_token(settings)
            # An address that cannot be had must not cost the endpoint that is running.
            # Its own port is free only once it has ended.
            port = 0 if settings.port == running.port else settings.port
            listen(settings.host, port).close()
            report(
                "the endpoint's code, address, token, allowed origins or connection limits "
                "changed: restarting it"
            )
            _end(running)
            good = state.good.read()
            if good and not desired.is_of(good):
                # What served before comes back first: then a version that cannot serve, or is
                # worse, costs no more than this restart.
                before = good.model_copy(update={"settings": settings})
                try:
                    replace(change, desired=before).make(None)
                except RolloutFailed:
                    raise  # Somebody stopped it.
                except UserError:
                    # What served before cannot be started again, which is no reason against what is
                    # wanted. A RolloutFailed is a UserError, too, so it is caught first.
                    pass
            running = state.running
        if running and _serves(running, desired):
            # `rollout` may differ, which `_serves` leaves out: the server takes it over without a
            # new engine.
            state.desired.write(desired)
            return Endpoint(running, _route(running, desired), changed=False)
        outcome = change.make(running)
        if state.stopped_path.exists():
            # Asked for while there was no process yet to end.
            _end(outcome)
            raise RolloutFailed(f"The endpoint was stopped once it served {desired.version}.")
        return Endpoint(outcome, _route(outcome, desired), changed=True)


@dataclass(frozen=True)
class _Change:
    """A version that is to be served, and who waits for it."""

    state: StateFolder
    desired: Desired
    report: Report
    still_wanted: Callable[[], bool]

    def make(self, running: Status | None) -> Status:
        """Have it served by the endpoint that runs, or by a new one; raises as `start`."""
        state, settings = self.state, self.desired.settings
        # Removed before anything is started, so that any stop that `_wait` finds came later.
        state.stopped_path.unlink(missing_ok=True)
        # Outcomes from before this moment are of earlier changes.
        child, began = None, time.time()
        if running is None:
            bearer_token(settings)
            # Tried here, where the error reaches whoever asked, and not only a log.
            listen(settings.host, settings.port).close()
        # An endpoint that runs sees by itself that this was written.
        state.desired.write(self.desired)
        if running is None:
            with state.log_path.open("ab") as output:
                command = [sys.executable, "-m", "serving.supervisor", "--state", str(state.folder)]
                child = Child(command, output=output, outlives_parent=True)
        return self._wait(began, child)

    def _wait(self, began: float, child: Child | None) -> Status:
        """Wait for the outcome; raises NoLongerWanted, RolloutFailed or UserError."""
        state, desired, settings = self.state, self.desired, self.desired.settings
        steps = len(settings.rollout.steps)
        # Two engines may have to be loaded, each step may last as long as a request, one drains.
        allowed = 2 * settings.start_timeout + (steps + 2) * settings.request_timeout
        allowed += steps * settings.rollout.step_seconds
        started = reported = time.monotonic()
        while True:
            code, current = child.poll() if child else None, state.status.read()
            if code is not None or (child is None and not (current and current.alive)):
                before = f"before it served version {desired.version}."
                if state.stopped_path.exists():
                    raise RolloutFailed(f"The endpoint was stopped {before}")
                ended = "ended" if code is None else how_it_ended(code)
                log = f"The end of its log ({state.log_path}):\n{tail(state.log_path)}"
                raise UserError(f"The endpoint {ended} {before} {log}")
            outcome = current.outcome if current and current.alive else None
            if current and outcome and outcome.at.timestamp() >= began and desired.is_of(outcome):
                if outcome.succeeded:
                    return current
                failure = f"Version {desired.version} is not served: {outcome.reason}"
                # Without a route the endpoint ends by itself. It is waited for, so that whoever
                # tries again at once does not find it running.
                if child and not current.routes:
                    child.wait(STOP_SECONDS)
                    raise UserError(failure)
                still = f" Version {current.routes[0].version} still is." if current.routes else ""
                raise RolloutFailed(f"{failure.rstrip('.')}.{still}")
            # Where it is just starting, nothing else could serve sooner.
            if child is None and not self.still_wanted():
                raise NoLongerWanted
            if time.monotonic() - started > allowed:
                raise UserError(
                    f"Version {desired.version} was not served after {allowed:.0f} s, for no known "
                    f"reason. The endpoint's log: {state.log_path}"
                )
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                phase = current.phase.replace("_", " ") if current else "starting"
                self.report(
                    f"endpoint {phase}, version {desired.version}: {reported - started:.0f} s "
                    f"(at most {allowed:.0f} s)"
                )
            time.sleep(POLL_SECONDS)


def stop(state_folder: Path) -> bool:
    """End the endpoint, its engines with it; returns whether one was running.

    From then on none is started until somebody asks for one, even where none was running.
    """
    state = StateFolder(state_folder)
    running, stopped = state.running, state.stopped_path
    try:
        # First of all, so that automation does not start it again meanwhile.
        make_private(stopped.parent)
        stopped.touch()
    finally:
        # Also where the disk is full or read-only, which is told then.
        if running is not None:
            _end(running)
    return running is not None


def _end(running: Status) -> None:
    os.kill(running.pid, signal.SIGTERM)
    end = time.monotonic() + STOP_SECONDS
    while running.alive and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    if running.alive:
        # Its API server and engines end with it.
        os.kill(running.pid, signal.SIGKILL)


def _serves(running: Status, desired: Desired) -> bool:
    # How a version takes over decides nothing once it has all traffic.
    current, target = (side.settings.model_dump(exclude={"rollout"}) for side in (running, desired))
    return (
        running.phase == "serving"
        and current == target
        and any(route.share == 1.0 and desired.is_of(route) for route in running.routes)
    )


def _needs_new_server(running: Status, settings: EndpointSettings) -> bool:
    """Whether what is set when the server begins to listen has changed."""
    fixed = {
        *("host", "port", "token_variable"),
        *("max_connections", "header_timeout", "allowed_origins"),
    }
    current = running.settings
    if current.model_dump(include=fixed) != settings.model_dump(include=fixed):
        return True
    # After an upgrade its API server and the engines that it starts would be of two releases.
    if running.code != code_hash():
        return True
    # Where the variable is not set, nothing speaks against the token that the server has.
    if not os.environ.get(settings.token_variable or ""):
        return False
    # Only the server knows its own, so it is asked with the one that the variable has.
    try:
        with httpx.Client(**running.client_options(), timeout=ASK_SECONDS) as client:
            answer = client.get("/v1/models")
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return answer.status_code == httpx.codes.UNAUTHORIZED


def _route(running: Status, desired: Desired) -> RouteStatus:
    return next(route for route in running.routes if desired.is_of(route))
