"""Programs that are kept running by supervisord: their start, their state, their end.

supervisord starts a program again whenever it ends, and keeps its log at a bounded size. It listens
on a socket in a folder that its owner alone may enter, among the machine's temporary ones: the
kernel takes no path longer than 107 bytes, and projects lie deeper.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xmlrpc.client import Fault, ServerProxy

from artifacts.errors import UserError
from artifacts.storage.machine import make_private
from llm_assets.services.leftovers import MARK, end_leftovers, find_leftovers, note_session

LOG_BYTES = 16 * 1024 * 1024
"""Of one log; two older ones stay beside it."""
STEADY_SECONDS = 3
"""After which a program that was started counts as running."""
MOST_RESTARTS = 1000
"""In a row; each waits a second longer than the one before, so this is days."""
STOP_SECONDS = 60
"""For a program to end by itself once it was asked to."""
ANSWER_SECONDS = 20.0
POLL_SECONDS = 0.2
CONTROL_NAME = "control"
"""A link in the state folder to the socket."""
CONFIGURATION_NAME = "supervisord.conf"

CONFIGURATION = """\
[unix_http_server]
file = {socket}
chmod = 0700
[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
[supervisorctl]
serverurl = unix://{socket}
[supervisord]
nodaemon = true
silent = true
umask = 077
logfile = {state}/supervisord.log
logfile_maxbytes = {log_bytes}
logfile_backups = 1
pidfile = {state}/supervisord.pid
"""
PROGRAM = """\
[program:{name}]
command = {command}
autorestart = true
startsecs = {steady}
startretries = {restarts}
stopasgroup = true
killasgroup = true
stopwaitsecs = {stop}
redirect_stderr = true
stdout_logfile = {state}/{name}.log
stdout_logfile_maxbytes = {log_bytes}
stdout_logfile_backups = 2
"""


@dataclass(frozen=True)
class Service:
    """A program that shall always run."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class ServiceState:
    """What a service is doing."""

    name: str
    state: str
    """`running`, `starting`, `backoff` (it ended and is started again), `fatal` …"""
    pid: int
    """0 while there is no process."""
    said: str
    """By supervisord, for people: pid and uptime, or how it ended."""


def start(state: Path, services: Sequence[Service], environment: Mapping[str, str]) -> None:
    """Start a supervisor with its services in a session of their own, and return once it answers.

    What a killed one has left has to be ended before.

    Args:
        state: folder of socket, logs and configuration.
        environment: of the services; secrets are passed on so, and written nowhere.

    Raises:
        UserError: it does not come up.
    """
    _prepare(state, services)
    supervisor = subprocess.Popen(
        _command(state),
        cwd=state.parent.parent,
        env=_marked(state, environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    note_session(state, supervisor.pid)
    end = time.monotonic() + ANSWER_SECONDS
    while read_states(state) is None:
        if supervisor.poll() is not None or time.monotonic() > end:
            raise UserError(f"The supervisor did not start. Its log: {state}/supervisord.log")
        time.sleep(POLL_SECONDS)


def become(state: Path, services: Sequence[Service], environment: Mapping[str, str]) -> None:
    """Turn this very process into the supervisor, as systemd and containers want it."""
    _prepare(state, services)
    note_session(state, os.getsid(0))
    os.chdir(state.parent.parent)
    os.execve(sys.executable, _command(state), _marked(state, environment))  # noqa: S606 - our own program


def _prepare(state: Path, services: Sequence[Service]) -> None:
    make_private(state)
    _remove_socket(state)
    socket = Path(tempfile.mkdtemp(prefix="llm-assets-")) / CONTROL_NAME
    (state / CONTROL_NAME).symlink_to(socket)
    (state / CONFIGURATION_NAME).write_text(configuration(state, socket, services))


def _remove_socket(state: Path) -> None:
    link = state / CONTROL_NAME
    if link.is_symlink():
        shutil.rmtree(link.readlink().parent, ignore_errors=True)
        link.unlink()


def configuration(state: Path, socket: Path, services: Sequence[Service]) -> str:
    """What supervisord reads; no secret is in it."""
    common = {"state": _escaped(str(state)), "log_bytes": LOG_BYTES}
    times = {"steady": STEADY_SECONDS, "restarts": MOST_RESTARTS, "stop": STOP_SECONDS}
    programs = [
        PROGRAM.format(
            name=service.name, command=_escaped(shlex.join(service.command)), **common, **times
        )
        for service in services
    ]
    return CONFIGURATION.format(socket=_escaped(str(socket)), **common) + "".join(programs)


def read_states(state: Path) -> list[ServiceState] | None:
    """What each service is doing; None where no supervisor runs."""
    if not (state / CONTROL_NAME).exists():
        return None
    try:
        found: Any = _ask(state).getAllProcessInfo()
    except (OSError, Fault):
        return None
    return [
        ServiceState(one["name"], one["statename"].lower(), one["pid"], one["description"])
        for one in found
    ]


def stop(state: Path) -> bool:
    """End the supervisor, its services and all that they started; returns whether there was any.

    What else has a session of its own, as the endpoint does, stays.
    """
    if read_states(state) is not None:
        supervisor = int(_ask(state).getPID())
        os.kill(supervisor, signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS + ANSWER_SECONDS
        while supervisor in find_leftovers(state) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        end_leftovers(state)
        _remove_socket(state)
        return True
    return end_leftovers(state) > 0


def _command(state: Path) -> list[str]:
    configured = str(state / CONFIGURATION_NAME)
    return [sys.executable, "-m", "supervisor.supervisord", "-c", configured]


def _marked(state: Path, environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, MARK: str(state)}


def _ask(state: Path) -> Any:
    from supervisor.xmlrpc import SupervisorTransport

    transport = SupervisorTransport(None, None, f"unix://{(state / CONTROL_NAME).readlink()}")
    return ServerProxy("http://127.0.0.1", transport=transport).supervisor


def _escaped(text: str) -> str:
    return text.replace("%", "%%")
