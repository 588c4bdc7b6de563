"""Webserver, daemon and board of a project, which supervisord keeps running.

supervisord restarts a program whenever it ends, and limits the size of its log. It listens on a
socket beside the logs, where no cleaner of temporary files comes. The kernel accepts no path longer
than 107 bytes, and projects lie deeper: so the socket is named from a folder that is open.

A daemon that is killed leaves its code server and its runs behind. They stay in the session of the
supervisor, even if that is dead itself, and are ended before new ones start. The endpoint has a
session of its own, and outlives all of them.
"""

import contextlib
import importlib.util
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xmlrpc.client import Fault, ServerProxy

from artifacts.errors import CONFIG_VARIABLE, UserError, install_advice
from artifacts.leases import local_lease
from artifacts.program.lifetime import Child
from artifacts.progress import Report
from artifacts.storage.files import make_private
from serving.logs import tail
from serving.settings import listen

if TYPE_CHECKING:
    import psutil

HOST = "127.0.0.1"
PORT = 3000
BOARD_PORT = 8012
STATE_FOLDER = Path(".llm_assets/services")
WORKSPACE = "workspace.yaml"
PROGRAMS = Path(sys.executable).parent
PACKAGES = ("dagster_webserver", "supervisor")
"""Packages of the extra `ui`."""
START_SECONDS = 300.0
"""Time for the webserver to load the definitions, on a machine with other work too."""
REPORT_SECONDS = 10.0
ANSWER_SECONDS = 20.0
SAVE_SECONDS = 30.0
"""Time for a run that is being ended to save its state."""
STOP_SECONDS = 60
"""Time for a program to end by itself after supervisord asked it to."""
POLL_SECONDS = 0.2
LOOK_SECONDS = 2.0
"""Between two looks of who waits whether the services are still kept running."""
PROGRAM_SECONDS = 1.0
"""Time for a new process to execute its program, and so to have an environment."""
PROGRAM_POLL_SECONDS = 0.001
FAILED = ("backoff", "exited", "fatal")
MARK = "LLM_ASSETS_SERVICES"
"""Environment variable of every service of a folder, with the folder."""
LOCK_NAME = "start.lock"
"""File in the state folder that whoever starts the services holds."""
SESSION_NAME = "session"
"""File in the state folder with the number of the services' session."""
CONTROL_NAME = "control"
"""Socket in the state folder. Of services that an earlier release started, it is a link to one."""
CONFIGURATION_NAME = "supervisord.conf"
# No daemon: that would leave the process and the session whose number is noted.
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
logfile_maxbytes = 16MB
logfile_backups = 1
pidfile = {state}/supervisord.pid
"""
# A thousand restarts in a row take days, because each waits a second longer than the last.
PROGRAM = """\
[program:{name}]
command = {command}
autorestart = true
startsecs = 3
startretries = 1000
stopasgroup = true
killasgroup = true
stopwaitsecs = {stop}
redirect_stderr = true
stdout_logfile = {state}/{name}.log
stdout_logfile_maxbytes = 16MB
stdout_logfile_backups = 2
"""


@dataclass(frozen=True)
class ServiceState:
    """What a service is doing."""

    name: str
    state: str
    """`running`, `starting`, `backoff` (it ended and is started again), `fatal` …"""
    pid: int
    """0 while there is no process."""
    description: str
    """By supervisord, for people: pid and uptime, or how it ended."""


def bring_up(folder: Path, config: Path, port: int, board_port: int, report: Report) -> None:
    """Have a project's services run, and say where once they answer; those that run already stay.

    The folder is absolute; UI and board listen on loopback alone.

    Raises:
        UserError: the extra `ui` is absent, the folder is no project, a port is taken, or a service
            does not start.
    """
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise UserError(install_advice(package) or f"{package} is not installed here")
    if not (folder / WORKSPACE).exists():
        raise UserError(
            f"{folder} has no {WORKSPACE}, so it is not a project. Go to the project's folder, "
            "or make one with: llm-assets init FOLDER_OF_TEXT"
        )
    state = folder / STATE_FOLDER
    make_private(state)
    # If two started services at once, `down` would know only those of the second.
    with local_lease(state / LOCK_NAME, lambda who: report(f"waiting for {who}")):
        if read_states(state) is not None:
            report(
                f"The services are already running, as {state / CONFIGURATION_NAME} has their "
                "commands with the ports. To change a port or the pipeline file, first: "
                "llm-assets down"
            )
            return
        # Processes that a killed supervisor left behind still hold the ports.
        end_leftovers(state)
        # Tried here, where the message reaches whoever asked and not only the log of a service.
        for option, number in (("--port", port), ("--board-port", board_port)):
            listen(HOST, number, f"port with {option}").close()
        environment = os.environ | {
            CONFIG_VARIABLE: str(config.absolute()),
            "PATH": f"{PROGRAMS}:{os.environ.get('PATH', os.defpath)}",
        }
        # `-w` and the name of a module exclude each other.
        environment.pop("DAGSTER_MODULE_NAME", None)
        try:
            start(state, _commands(port, board_port), environment)
            _wait(state, (port, board_port), report)
        except BaseException:
            # Ctrl-C included: nothing half started remains.
            stop(state)
            raise
    report(f"board: http://{HOST}:{board_port}   UI: http://{HOST}:{port}")


def _commands(port: int, board_port: int) -> dict[str, list[str]]:
    """Name and command of each service."""
    workspace = ("-w", WORKSPACE)
    webserver = str(PROGRAMS / "dagster-webserver")
    return {
        "daemon": [str(PROGRAMS / "dagster-daemon"), "run", *workspace],
        "webserver": [webserver, *workspace, "-h", HOST, "-p", str(port)],
        "board": [str(PROGRAMS / "llm-assets"), "board", "--port", str(board_port)],
    }


def start(state: Path, services: Mapping[str, list[str]], environment: Mapping[str, str]) -> None:
    """Start a supervisor with its services in a session of their own, and return once it answers.

    What a killed one has left has to be ended before. Secrets are passed on by the environment, and
    written nowhere. Raises UserError where it does not come up.

    Args:
        state: folder of socket, logs and configuration, within the current one.
        services: names and commands of programs that shall always run.
    """
    make_private(state)
    # A killed supervisor's, or a link to that of the project that this one was copied from.
    (state / CONTROL_NAME).unlink(missing_ok=True)
    # Relative, since a path of the project may contain characters special to supervisord, which
    # makes that of a socket absolute.
    relative = os.path.relpath(state)
    paths = {"state": relative, "socket": f"/proc/self/cwd/{relative}/{CONTROL_NAME}"}
    configuration = CONFIGURATION.format(**paths)
    for name, command in services.items():
        escaped = _escape(shlex.join(command))
        configuration += PROGRAM.format(name=name, command=escaped, stop=STOP_SECONDS, **paths)
    (state / CONFIGURATION_NAME).write_text(configuration)
    supervisor = Child(
        [sys.executable, "-m", "supervisor.supervisord", "-c", str(state / CONFIGURATION_NAME)],
        environment={**environment, MARK: str(state)},
        output=subprocess.DEVNULL,
        outlives_parent=True,
    )
    # With `outlives_parent` it leads a session of its own, whose number is its pid.
    (state / SESSION_NAME).write_text(str(supervisor.pid))
    end = time.monotonic() + ANSWER_SECONDS
    while read_states(state) is None:
        if supervisor.poll() is not None or time.monotonic() > end:
            raise UserError(f"The supervisor did not start. Its log: {state}/supervisord.log")
        time.sleep(POLL_SECONDS)


def read_states(state: Path) -> list[ServiceState] | None:
    """What each service of a state folder is doing; None where no supervisor runs."""
    if not (state / CONTROL_NAME).exists():
        return None
    try:
        with _supervisor(state) as supervisor:
            services = supervisor.getAllProcessInfo()
    except (OSError, Fault):
        # A supervisor that is shutting down answers every call with a fault.
        return None
    return [
        ServiceState(
            service["name"], service["statename"].lower(), service["pid"], service["description"]
        )
        for service in services
    ]


def stop(state: Path) -> bool:
    """End the supervisor, its services and all that they started; returns whether there was any.

    Processes in a session of their own, such as the endpoint, stay.
    """
    if read_states(state) is None:
        return end_leftovers(state) > 0
    with _supervisor(state) as listening:
        supervisor = int(listening.getPID())
    os.kill(supervisor, signal.SIGTERM)
    # supervisord gives each program STOP_SECONDS to end by itself.
    end = time.monotonic() + STOP_SECONDS + ANSWER_SECONDS
    # By session and mark, since its number may be that of another process by now.
    while supervisor in find_leftovers(state) and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
    end_leftovers(state)
    return True


def wait_for_end(state: Path, signals: Collection[signal.Signals]) -> None:
    """Return once the services are stopped, by one of these signals or by somebody else.

    Raises:
        UserError: their supervisor was killed; what it has left is ended.
    """
    while signal.sigtimedwait(signals, LOOK_SECONDS) is None:
        if read_states(state) is not None or _lives(state):
            continue
        # One that ends by itself takes its socket away.
        if not (state / CONTROL_NAME).exists():
            return
        end_leftovers(state)
        raise UserError(
            "The supervisor of the services was killed, and what it had started is stopped. Start "
            f"them again with: llm-assets up. Its log: {state}/supervisord.log"
        )
    stop(state)


def _lives(state: Path) -> bool:
    """Whether there is a supervisor, which answers nothing while it stops its services."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int((state / SESSION_NAME).read_text()) in find_leftovers(state)
    return False


def find_leftovers(state: Path) -> list[int]:
    """Processes of the session that was recorded last."""
    import psutil

    try:
        session = int((state / SESSION_NAME).read_text())
    except (FileNotFoundError, ValueError):
        return []
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and _is_marked(process, state):
                processes.append(process.pid)
    return processes


def _is_marked(process: "psutil.Process", state: Path) -> bool:
    """Whether a process is a service: by now, the session's number may belong to another one."""
    import psutil

    end = time.monotonic() + PROGRAM_SECONDS
    # While a process executes a new program, its environment is empty.
    while not (environment := process.environ()) and time.monotonic() < end:
        if process.status() == psutil.STATUS_ZOMBIE:
            break
        time.sleep(PROGRAM_POLL_SECONDS)
    return environment.get(MARK) == str(state)


def end_leftovers(state: Path) -> int:
    """End them, by force if they do not end by themselves; returns how many there were.

    A run that is ended this way counts as failed, not canceled, so automation launches it again.
    """
    leftovers = remaining = find_leftovers(state)
    _signal(leftovers, signal.SIGTERM)
    end = time.monotonic() + SAVE_SECONDS
    while remaining and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        remaining = find_leftovers(state)
    _signal(remaining, signal.SIGKILL)
    (state / SESSION_NAME).unlink(missing_ok=True)
    return len(leftovers)


def _wait(state: Path, ports: tuple[int, ...], report: Report) -> None:
    began = reported = time.monotonic()
    while True:
        services = read_states(state) or []
        for service in services:
            if service.state in FAILED:
                log = state / f"{service.name}.log"
                raise UserError(
                    f"The service {service.name} exited while starting ({service.description}). "
                    f"The end of its log, {log}:\n{tail(log)}"
                )
        ready = services and all(service.state == "running" for service in services)
        if ready and all(map(_answers, ports)):
            return
        now = time.monotonic()
        if now - began > START_SECONDS:
            raise UserError(
                f"The UI or the board did not answer within {START_SECONDS:.0f} s. Their logs are "
                f"in {state}."
            )
        if now - reported > REPORT_SECONDS:
            reported = now
            report(f"starting: {now - began:.0f} s (at most {START_SECONDS:.0f} s)")
        time.sleep(POLL_SECONDS)


def _answers(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(POLL_SECONDS)
        return client.connect_ex((HOST, port)) == 0


@contextlib.contextmanager
def _supervisor(state: Path) -> Iterator[Any]:
    from supervisor.xmlrpc import SupervisorTransport

    folder = os.open(state, os.O_PATH)
    try:
        address = f"unix:///proc/self/fd/{folder}/{CONTROL_NAME}"
        transport = SupervisorTransport(None, None, address)
        with ServerProxy("http://127.0.0.1", transport=transport) as server:
            yield server.supervisor
    finally:
        os.close(folder)


def _escape(text: str) -> str:
    # After white space, supervisord takes these for a comment, even in quotes; empty quotes
    # separate.
    return re.sub(r"(?<=\s)(?=[;#])", "''", text.replace("%", "%%"))


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
