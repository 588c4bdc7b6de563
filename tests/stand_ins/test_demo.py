"""`make demo-cloud`, as the README shows it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.listening import outside_loopback, run_watched
from tests.stand_ins.processes import REPOSITORY
from tests.waiting import WAIT_SECONDS, wait_until

ASSETS = (
    *("base_model", "raw_corpus", "clean_corpus", "tokenized_shards"),
    *("checkpoint", "eval_metrics", "model_version", "endpoint"),
)


@contextmanager
def running_demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demo, with its output and its temporary files in a folder; ended afterwards."""
    with (folder / "output.txt").open("w") as output:
        demo = subprocess.Popen(
            [sys.executable, "-m", "tests.stand_ins.demo", *arguments],
            cwd=REPOSITORY,
            env=os.environ | {"TMPDIR": str(folder)},
            stdout=output,
            stderr=output,
            text=True,
        )
    try:
        yield demo
    finally:
        demo.terminate()
        demo.wait(WAIT_SECONDS)


def own_folders(folder: Path) -> list[str]:
    """What the demo and its stand-ins have left of their temporary files."""
    own = ("bigquery-", "demo-", "local-google-")
    return [path.name for path in folder.iterdir() if path.name.startswith(own)]


def command_line(process: psutil.Process) -> str:
    """Empty for one that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def wait_for_the_graph(demo: subprocess.Popen[str]) -> list[psutil.Process]:
    """All that the demo has started, once it makes the graph."""

    def started() -> list[psutil.Process]:
        return psutil.Process(demo.pid).children(recursive=True)

    wait_until(lambda: any("llm-assets" in command_line(one) for one in started()))
    return started()


@pytest.mark.soak
def test_demo_makes_the_whole_graph_and_leaves_nothing_running(tmp_path: Path) -> None:
    with running_demo(tmp_path) as demo:
        listened = run_watched(demo)
    assert listened and outside_loopback(listened) == set()
    check_whole_graph(demo, tmp_path)
    assert own_folders(tmp_path) == []


def check_whole_graph(demo: subprocess.Popen[str], folder: Path) -> None:
    """What an ended demo has shown."""
    shown = (folder / "output.txt").read_text()
    assert demo.returncode == 0, shown
    assert [asset for asset in ASSETS if f"✓ {asset}" not in shown] == []
    assert shown.count("SUCCEEDED") == 4
    assert "on 2 replicas, 2 starts: JOB_STATE_SUCCEEDED" in shown
    assert "Going on from the checkpoint of step" in shown and "2 worker(s)" in shown
    cost = r"(0\.0[1-9]|less than 0\.01) USD for the machines that built it and everything it was "
    assert re.search(cost, shown)
    assert "The endpoint has stopped." in shown


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_demo_that_is_ended_takes_all_that_it_started_with_it(
    number: signal.Signals, tmp_path: Path
) -> None:
    with running_demo(tmp_path) as demo:
        started = wait_for_the_graph(demo)
        assert any(process.name().startswith("fake-gcs") for process in started)
        demo.send_signal(number)
        assert demo.wait(WAIT_SECONDS) != 0
    _, alive = psutil.wait_procs(started, WAIT_SECONDS)
    assert [process.cmdline() for process in alive] == []
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    if number is not signal.SIGKILL:
        assert own_folders(tmp_path) == []
