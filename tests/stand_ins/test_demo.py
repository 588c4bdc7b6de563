"""`make demo-cloud`, as the README shows it."""

import subprocess
import sys

import pytest

from tests.stand_ins.processes import REPOSITORY


@pytest.mark.soak
def test_demo_makes_the_whole_graph_and_leaves_nothing_running() -> None:
    command = [sys.executable, "-m", "tests.stand_ins.demo"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "✓ endpoint" in done.stdout
    assert done.stdout.count("SUCCEEDED") == 4
    assert "on 2 replicas" in done.stdout
    assert "The endpoint has ended." in done.stdout
