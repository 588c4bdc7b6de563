"""Dagster's own daemon and webserver beside a project, as `llm-assets up` starts them."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.conftest import ROOT, Project
from tests.stand_ins.processes import free_port
from tests.waiting import wait_until


@contextmanager
def service(project: Project, *command: str) -> Iterator[Path]:
    """Run a program of Dagster's until the block ends; gives the file that it prints to."""
    log = project.folder / f"{command[0]}.log"
    with log.open("ab") as file:
        program = [*command, "-w", str(ROOT / "workspace.yaml")]
        environment = project.environment()
        # It would be a second location.
        del environment["DAGSTER_MODULE_NAME"]
        process = subprocess.Popen(
            program, cwd=project.folder, env=environment, stdout=file, stderr=file
        )
    try:
        yield log
    finally:
        process.terminate()
        process.wait()


@contextmanager
def daemon(project: Project) -> Iterator[Path]:
    """`dagster-daemon`, which runs queued runs, sensors and schedules; gives its log."""
    with service(project, "dagster-daemon", "run") as log:
        yield log


@contextmanager
def webserver(project: Project) -> Iterator[str]:
    """The UI on loopback; gives its address."""
    port = free_port()
    command = ("dagster-webserver", "-h", "127.0.0.1", "-p", str(port))
    with service(project, *command) as log:
        address = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            try:
                return httpx.get(f"{address}/server_info").is_success
            except httpx.TransportError:
                return False

        wait_until(answers, told=log.read_text)
        yield address
