"""`make demo-cloud`, as the README shows it."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.listening import outside_loopback, run_watched
from tests.stand_ins.processes import REPOSITORY


@pytest.mark.soak
def test_demo_makes_the_whole_graph_and_leaves_nothing_running(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.stand_ins.demo"]
    output = tmp_path / "output.txt"
    with output.open("w") as file:
        done = subprocess.Popen(command, cwd=REPOSITORY, stdout=file, stderr=file, text=True)
    listened = run_watched(done)
    shown = output.read_text()
    assert done.returncode == 0, shown
    assert listened and outside_loopback(listened) == set()
    assert "✓ endpoint" in shown
    assert shown.count("SUCCEEDED") == 4
    assert "on 2 replicas" in shown
    assert "The endpoint has ended." in shown
