"""The board as a command: its port, and where it finds the history of runs."""

import re
import socket

import httpx
import pytest

from tests.conftest import Project
from tests.forked import Surroundings, start_command
from tests.waiting import wait_until


@pytest.mark.fault(
    "settings and commands",
    "port of the board in use by another program",
    sees="the port and the option",
    then="the command ends",
)
def test_a_taken_port_is_named_with_the_option_that_chooses_it(project: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = project.run("llm-assets", "board", "--port", str(port))
    assert ended.returncode == 1
    assert f"port {port} (Address already in use)." in ended.stderr
    assert "choose another port with --port" in ended.stderr
    assert "endpoint.port" not in ended.stderr


@pytest.mark.parametrize("is_project", [True, False])
def test_a_scrape_finds_the_history_of_the_folder(project: Project, is_project: bool) -> None:
    environment, output = project.environment(), project.folder / "output.txt"
    del environment["DAGSTER_HOME"]
    if not is_project:
        (project.folder / "dagster.yaml").unlink()
    surroundings = Surroundings(project.folder, environment, output)
    board = start_command(["llm-assets", "board", "--port", "0"], surroundings)
    try:
        wait_until(lambda: output.exists() and "The board is at" in output.read_text())
        address = re.findall(r"at (http://\S+)", output.read_text())[0]
        metrics = httpx.get(f"{address}/metrics", timeout=60).text
    finally:
        board.kill()
        board.wait(60)
    assert f'llm_assets_readable{{part="history"}} {float(is_project)}' in metrics
    told = output.read_text()
    assert "DagsterHomeNotSetError" not in told
    assert ("There is no dagster.yaml here" in told) != is_project
