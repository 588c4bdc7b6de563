"""The services of one project: what they are, where they listen, with what environment."""

import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import UserError
from artifacts.progress import Report
from llm_assets.config import CONFIG_VARIABLE
from llm_assets.services import supervision, systemd
from llm_assets.services.leftovers import end_leftovers
from llm_assets.services.ports import HOST, METRICS_PORT, PORT
from llm_assets.services.supervision import Service, ServiceState

STATE_FOLDER = Path(".llm_assets/services")
PROJECT_FILES = ("dagster.yaml", "workspace.yaml")
START_SECONDS = 300.0
"""For the webserver to load the definitions, on a machine that has other work too."""
REPORT_SECONDS = 10.0
POLL_SECONDS = 0.5
LOG_TAIL_LINES = 15
FAILED = ("backoff", "exited", "fatal")


@dataclass(frozen=True)
class ProjectServices:
    """Webserver, daemon and metrics of the project in a folder."""

    folder: Path
    """Absolute; holds dagster.yaml and workspace.yaml."""
    config: Path
    """The pipeline file."""
    port: int = PORT
    metrics_port: int = METRICS_PORT

    @property
    def state(self) -> Path:
        """The folder of the services' socket, configuration and logs."""
        return self.folder / STATE_FOLDER

    @property
    def services(self) -> list[Service]:
        """All of them; each listens on loopback alone."""
        programs = Path(sys.executable).parent
        workspace = ("-w", "workspace.yaml")
        webserver = (str(programs / "dagster-webserver"), *workspace, "-h", HOST, "-p")
        return [
            Service("daemon", (str(programs / "dagster-daemon"), "run", *workspace)),
            Service("webserver", (*webserver, str(self.port))),
            Service(
                "metrics",
                (str(programs / "llm-assets"), "metrics", "--port", str(self.metrics_port)),
            ),
        ]

    @property
    def environment(self) -> dict[str, str]:
        """What makes them find pipeline file, history and programs, beside what is set already."""
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
        # `-w` and the name of a module exclude each other.
        kept = {name: v for name, v in os.environ.items() if name != "DAGSTER_MODULE_NAME"}
        own = {CONFIG_VARIABLE: str(self.config.absolute()), "DAGSTER_HOME": str(self.folder)}
        return {**kept, **own, "PATH": path}


def bring_up(project: ProjectServices, report: Report) -> None:
    """Have the services run, and return once the UI answers; those that run already stay.

    Raises:
        UserError: the folder is no project, a port is taken, or a service does not start.
    """
    if supervision.read_states(project.state) is not None:
        report("The services run already; `llm-assets down` ends them.")
        return
    _prepare(project)
    try:
        if systemd.is_there():
            systemd.install(project.folder, _foreground(project), project.environment)
        else:
            supervision.start(project.state, project.services, project.environment)
        _wait(project, report)
    except BaseException:
        # Ctrl-C among them: nothing half started stays.
        take_down(project.folder)
        raise


def stay_up(project: ProjectServices) -> None:
    """Become the supervisor of the services; does not return."""
    _prepare(project)
    supervision.become(project.state, project.services, project.environment)


def take_down(folder: Path) -> bool:
    """End the services of a folder and the runs that they started; whether there were any.

    The endpoint goes on: `llm-assets stop` ends it.
    """
    was_installed = systemd.remove(folder)
    return supervision.stop(folder / STATE_FOLDER) or was_installed


def read_services(folder: Path) -> list[ServiceState] | None:
    """What the services of a folder are doing; None where they are down."""
    return supervision.read_states(folder / STATE_FOLDER)


def _prepare(project: ProjectServices) -> None:
    for name in PROJECT_FILES:
        if not (project.folder / name).exists():
            raise UserError(
                f"{project.folder} has no {name}, so it is no project. Go to the project's folder, "
                "or make one with: llm-assets init FOLDER_OF_TEXT"
            )
    # What a supervisor that was killed has left still holds the ports.
    end_leftovers(project.state)
    for option, port in (("--port", project.port), ("--metrics-port", project.metrics_port)):
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind((HOST, port))
            except OSError as error:
                raise UserError(
                    f"Port {port} of {HOST} cannot be used ({error.strerror}). End what listens "
                    f"there, or choose another one with {option}."
                ) from None


def _wait(project: ProjectServices, report: Report) -> None:
    began = reported = time.monotonic()
    while True:
        states = supervision.read_states(project.state) or []
        for one in states:
            if one.state in FAILED:
                raise UserError(
                    f"The service {one.name} ended as it started ({one.said}). The end of its log, "
                    f"{project.state / one.name}.log:\n{_tail(project.state / f'{one.name}.log')}"
                )
        ready = states and all(one.state == "running" for one in states)
        if ready and all(map(_answers, (project.port, project.metrics_port))):
            return
        now = time.monotonic()
        if now - began > START_SECONDS:
            raise UserError(f"The UI did not answer in {START_SECONDS:.0f} s: see {project.state}.")
        if now - reported > REPORT_SECONDS:
            reported = now
            report(f"starting: {now - began:.0f} s (at most {START_SECONDS:.0f} s)")
        time.sleep(POLL_SECONDS)


def _answers(port: int) -> bool:
    with socket.socket() as tried:
        tried.settimeout(POLL_SECONDS)
        return tried.connect_ex((HOST, port)) == 0


def _foreground(project: ProjectServices) -> tuple[str, ...]:
    ports = ("--port", str(project.port), "--metrics-port", str(project.metrics_port))
    return (str(Path(sys.executable).parent / "llm-assets"), "up", "--foreground", *ports)


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return ""
    return "\n".join(lines[-LOG_TAIL_LINES:])
