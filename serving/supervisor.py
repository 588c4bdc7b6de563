"""Keeps an endpoint's API server alive: holds its socket, starts it again when it dies.

Started by `serving.endpoint` as `python -m serving.supervisor --state FOLDER`. It does nothing
else, so that there is little that could end it. Connections that arrive while the API server is
down wait in the socket for the next one.
"""

import argparse
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from select import select
from time import monotonic, sleep
from types import FrameType

from artifacts.errors import UserError
from artifacts.program.lifetime import Child, use_own_temporary_folder
from serving.logs import log, log_to
from serving.settings import listen
from serving.state import STEADY_SECONDS, StateFolder, restart_pause

CANNOT_SERVE = 3
"""Exit code of an API server for which starting again is no help; the log says why."""
POLL_SECONDS = 0.2
START_SECONDS = 120.0
"""Until the first sign of life: Python's modules may be slow to come from a disk."""
STOP_SECONDS = 25.0
"""More than the 10 s that an API server gives its answers and the 10 s that it gives its engines,
and less than whoever stops an endpoint waits."""


class Supervisor:
    """The parent of the API server of one state folder."""

    def __init__(self, state: StateFolder, listener: socket.socket) -> None:
        """Nothing is started yet."""
        self._state, self._listener = state, listener
        log_to(state.log_path)
        self._stop_by: float | None = None

    def run(self) -> int:
        """Keep an API server alive until one ends as it was asked to; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_stop)
        # Earlier releases say with it that another version is wanted; the API server sees that by
        # itself.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        deaths = 0
        while True:
            began = monotonic()
            try:
                code = self._run_once()
            except OSError as error:
                # There are no more processes, or no more memory, to be had just now.
                code = 1
                log("api_server_not_started", reason=str(error))
            if code in (0, CANNOT_SERVE) or self._stop_by is not None:
                return 1 if code == CANNOT_SERVE else 0
            deaths = 0 if monotonic() - began > STEADY_SECONDS else deaths
            pause = restart_pause(deaths)
            deaths += 1
            log("api_server_ended", status=code, restarted_in_seconds=pause)
            # Nothing answers just now. Otherwise the API server alone writes the status; it is
            # dead, so the two never write at once.
            with suppress(OSError, UserError):
                if status := self._state.status.read():
                    dead: dict[str, object] = {"phase": "starting", "routes": [], "outcome": None}
                    self._state.status.write(status.model_copy(update=dead))
            end = monotonic() + pause
            while monotonic() < end:
                if self._stop_by is not None:
                    return 0
                sleep(POLL_SECONDS)

    def _run_once(self) -> int:
        """Start an API server and wait until it ends; returns its exit code."""
        life, beats = os.pipe()
        try:
            server = Child(
                [
                    *(sys.executable, "-m", "serving.server"),
                    *("--state", str(self._state.folder)),
                    *("--listener", str(self._listener.fileno()), "--beats", str(beats)),
                ],
                descriptors=[beats, self._listener.fileno()],
            )
        except BaseException:
            os.close(life)
            raise
        finally:
            # The pipe ends with the server only if nobody else holds its end.
            os.close(beats)
        try:
            return self._watch(server, life)
        finally:
            # Where watching it has failed, it must not serve on beside the one that is started
            # next.
            server.kill()
            os.close(life)

    def _watch(self, server: Child, life: int) -> int:
        """Wait until an API server has ended; end it where it stands still."""
        heard, allowed, is_asked_to_stop = monotonic(), START_SECONDS, False
        while (code := server.poll()) is None:
            if self._stop_by is not None and not is_asked_to_stop:
                server.signal(signal.SIGTERM)
                is_asked_to_stop = True
            if select([life], [], [], POLL_SECONDS)[0]:
                heard = monotonic()
                if beats := os.read(life, 65_536).split():
                    # Each says how long a silence may last, by the settings of then.
                    allowed = float(beats[-1])
                else:
                    # It has closed the pipe, so it is about to end.
                    server.wait(POLL_SECONDS)
            elif monotonic() - heard > allowed or (
                self._stop_by is not None and monotonic() > self._stop_by
            ):
                log("api_server_stands_still", seconds=round(monotonic() - heard, 1))
                server.kill()
        return code

    def _note_stop(self, number: int, frame: FrameType | None) -> None:
        # A second signal does not put off the end.
        self._stop_by = self._stop_by or monotonic() + STOP_SECONDS


def main() -> int:
    """Run the endpoint of a state folder until a signal; exit code 1 where it cannot begin."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True)
    state = StateFolder(parser.parse_args().state)
    use_own_temporary_folder()
    try:
        desired = state.desired.read()
        if desired is None:
            raise UserError(f"{state.folder} does not say what to serve: it has no desired.json.")
        with listen(desired.settings.host, desired.settings.port) as listener:
            return Supervisor(state, listener).run()
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
