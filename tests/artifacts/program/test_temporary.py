"""Temporary files end with their process, a killed one's with the next that comes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from artifacts.program.lifetime import HOLDER_NAME
from tests.artifacts.program.test_entry import REPOSITORY

PROGRAM = """
import multiprocessing.util, subprocess, sys, tempfile
from artifacts.program.lifetime import use_own_temporary_folder
use_own_temporary_folder()
use_own_temporary_folder()
tempfile.mkdtemp(prefix="spark-")
multiprocessing.util.get_temp_dir()
if "--with-child" in sys.argv:
    command = [sys.executable, sys.argv[0], "--waiting"]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    child.stdout.readline()
print("ready", flush=True)
if "--waiting" in sys.argv:
    sys.stdin.read()
if "--with-child" in sys.argv:
    child.communicate()
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def start(program: Path, place: Path, *arguments: str) -> subprocess.Popen[str]:
    """A program that has put something into its temporary folder."""
    process = subprocess.Popen(
        [sys.executable, str(program), *arguments],
        env=os.environ | {"TMPDIR": str(place), "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def holders(place: Path) -> list[str]:
    return [path.read_text() for path in place.glob(f"*/{HOLDER_NAME}")]


def test_a_program_leaves_nothing_and_its_child_has_a_folder_of_its_own(
    program: Path, place: Path
) -> None:
    process = start(program, place, "--with-child", "--waiting")
    assert len(holders(place)) == len(list(place.iterdir())) == 2
    end(process)
    end(start(program, place))
    assert not list(place.iterdir())


def test_what_a_killed_program_left_goes_with_the_next_and_what_is_used_stays(
    program: Path, place: Path
) -> None:
    (place / "llm-assets-of-somebody").mkdir()
    alive, killed = (start(program, place, "--waiting") for _ in range(2))
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert len(holders(place)) == 2

    end(start(program, place))

    assert len(holders(place)) == 1 and str(alive.pid) in holders(place)[0]
    end(alive)
    assert [path.name for path in place.iterdir()] == ["llm-assets-of-somebody"]
