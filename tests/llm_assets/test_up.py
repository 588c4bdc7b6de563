"""`llm-assets up` and `down`, with Dagster's own webserver and daemon."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from llm_assets.services import STATE_FOLDER, find_leftovers, read_states
from tests.conftest import ROOT, Project
from tests.listening import listening_addresses, outside_loopback
from tests.stand_ins.processes import free_port
from tests.waiting import WAIT_SECONDS, wait_until


@pytest.fixture
def ports() -> tuple[str, str]:
    """Two that nobody uses."""
    return str(free_port()), str(free_port())


@pytest.fixture
def ready(project: Project) -> Iterator[Project]:
    """A project with a workspace, whose services are ended afterwards."""
    workspace = (ROOT / "workspace.yaml").read_text()
    (project.folder / "workspace.yaml").write_text(workspace)
    yield project
    project.run("llm-assets", "down")


def _pid(project: Project, name: str) -> int:
    states = {one.name: one for one in read_states(project.folder / STATE_FOLDER) or []}
    return states[name].pid if name in states and states[name].state == "running" else 0


@pytest.mark.soak
def test_services_answer_come_back_when_killed_and_leave_nothing_behind(
    ready: Project, ports: tuple[str, str]
) -> None:
    port, board = ports
    options = ("--port", port, "--board-port", board)
    done = ready.run("llm-assets", "up", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"http://127.0.0.1:{port}" in done.stdout
    assert httpx.get(f"http://127.0.0.1:{port}/server_info").is_success
    assert httpx.get(f"http://127.0.0.1:{board}/").is_success
    status = json.loads(ready.run("llm-assets", "status", "--json").stdout)
    assert status["services"] == dict.fromkeys(("board", "daemon", "webserver"), "running")
    state = ready.folder / STATE_FOLDER
    addresses = set().union(*(listening_addresses(pid) for pid in find_leftovers(state)))
    assert addresses and not outside_loopback(addresses)

    beat = 'llm_assets_daemon_heartbeat_timestamp_seconds{daemon="sensor"}'
    metrics = f"http://127.0.0.1:{board}/metrics"
    # The first loads Dagster, which takes a busy machine longer than httpx waits by itself.
    log = (ready.folder / STATE_FOLDER / "daemon.log").read_text
    wait_until(lambda: beat in httpx.get(metrics, timeout=60).text, poll_seconds=1, told=log)
    before = _pid(ready, "daemon")
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: _pid(ready, "daemon") not in (0, before))
    again = ready.run("llm-assets", "up", *options)
    assert "are already running" in again.stdout

    down = ready.run("llm-assets", "down")
    assert "Stopped." in down.stdout, down.stderr
    assert not find_leftovers(state) and read_states(ready.folder / STATE_FOLDER) is None
    assert "Nothing was running." in ready.run("llm-assets", "down").stdout


@pytest.mark.soak
@pytest.mark.parametrize(
    ("end", "code"), [("terminated", 0), ("services stopped", 0), ("supervisor killed", 1)]
)
def test_a_containers_program_stays_as_long_as_its_services(
    ready: Project, ports: tuple[str, str], end: str, code: int
) -> None:
    command = [str(Path(sys.executable).parent / "llm-assets"), "up", "--wait"]
    options = ["--port", ports[0], "--board-port", ports[1]]
    process = subprocess.Popen(
        [*command, *options], cwd=ready.folder, env=ready.environment(), stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert any(b"stop them with" in line for line in process.stdout)
    assert httpx.get(f"http://127.0.0.1:{ports[1]}/").is_success and process.poll() is None
    state = ready.folder / STATE_FOLDER
    if end == "terminated":
        process.terminate()
    elif end == "services stopped":
        ready.run("llm-assets", "down")
    else:
        os.kill(int((state / "supervisord.pid").read_text()), signal.SIGKILL)
    assert process.wait(WAIT_SECONDS) == code
    assert not find_leftovers(state)


def test_a_folder_that_is_no_project_is_told(project: Project) -> None:
    done = project.run("llm-assets", "up")
    assert done.returncode == 1 and "has no workspace.yaml, so it is not a project" in done.stderr


def test_a_port_in_use_is_named_before_anything_starts(
    ready: Project, ports: tuple[str, str]
) -> None:
    with socket.create_server(("127.0.0.1", int(ports[0]))):
        done = ready.run("llm-assets", "up", "--port", ports[0], "--board-port", ports[1])
    assert done.returncode == 1 and f"Cannot listen on 127.0.0.1 port {ports[0]}" in done.stderr
    assert "choose another port with --port" in done.stderr
    assert read_states(ready.folder / STATE_FOLDER) is None
