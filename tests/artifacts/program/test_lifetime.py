"""What a program starts ends with it, by whatever way, and it is told how."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from artifacts.errors import UserError
from artifacts.leases import process_started
from artifacts.program.lifetime import (
    Child,
    Interruption,
    how_it_ended,
    importing,
    run_to_end,
    wait_for_all,
)
from tests.waiting import wait_until

SLEEP = ("sleep", "600")
WITH_A_CHILD = f"""
import subprocess, sys
print(subprocess.Popen({list(SLEEP)}).pid, flush=True)
sys.exit(3)
"""
STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""
KILLED_WITH_A_CHILD = """
import os, signal
from artifacts.program.lifetime import Child
print(Child(["sleep", "600"], heeds_parent=False).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
WATCHED = """
from artifacts.program.lifetime import Watchdog
with Watchdog(3, "It hangs."):
    print("ready", flush=True)
    input()
"""


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_what_a_program_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb") as output:
        child = Child(python(WITH_A_CHILD), output=output)
    assert child.wait() == 3
    pid = int((tmp_path / "said").read_text())
    wait_until(lambda: process_started(pid) is None)


def test_a_program_that_does_not_heed_its_parent_ends_with_it_all_the_same() -> None:
    ended = run_to_end(python(KILLED_WITH_A_CHILD))
    assert how_it_ended(ended.returncode) == "was ended by SIGKILL"
    wait_until(lambda: process_started(int(ended.stdout)) is None)


def test_a_program_that_will_not_end_is_ended(tmp_path: Path) -> None:
    with (tmp_path / "said").open("wb") as output:
        child = Child(python(STUBBORN), output=output)
    wait_until(lambda: (tmp_path / "said").read_text())
    child.signal(signal.SIGTERM)
    assert child.wait(0.2) is None
    child.end(0.2)
    assert child.poll() == -signal.SIGKILL


def test_a_program_that_was_stopped_has_not_hung() -> None:
    """As with Ctrl-Z, in a debugger, or on a machine that was suspended."""
    with subprocess.Popen(
        python(WATCHED), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin and program.stdout and program.stdout.readline() == "ready\n"
        program.send_signal(signal.SIGSTOP)
        time.sleep(4)
        program.send_signal(signal.SIGCONT)
        time.sleep(0.5)
        assert program.poll() is None
        program.communicate("\n")
    assert program.returncode == 0


@pytest.fixture
def interruption() -> Iterator[Interruption]:
    """What hears the signals in place of pytest, for one test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield Interruption()
    for number, handler in before.items():
        signal.signal(number, handler)


def test_where_one_of_several_fails_the_others_are_asked_to_end(interruption: Interruption) -> None:
    children = [Child(SLEEP), Child(python("raise SystemExit(4)"))]
    assert wait_for_all(children, interruption, 60) == [-signal.SIGTERM, 4]
    assert not interruption.requested


def test_who_is_told_to_end_has_its_children_end(interruption: Interruption) -> None:
    child = Child(SLEEP)
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for_all([child], interruption, 60) == [-signal.SIGTERM]
    assert interruption.signal_name == "SIGTERM"


def test_a_program_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="no program 'no-such-program'"):
        Child(["no-such-program"])


def test_garbage_is_looked_for_again_after_imports_and_after_one_that_failed() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), importing():
        import no_such_module  # noqa: F401
    assert gc.isenabled()
