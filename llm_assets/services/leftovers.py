"""What services started and left behind: found by their session, ended before others begin.

A daemon that is killed leaves its code server and its runs; they stay in the session of the
supervisor, though it may be dead itself. The endpoint has a session of its own, and outlives all.
"""

import os
import signal
import time
from pathlib import Path

from artifacts.leases.holder import PROCESSES

MARK = "LLM_ASSETS_SERVICES"
"""Environment variable of every service of a folder, with the folder."""
SESSION_NAME = "session"
SECONDS = 30.0
"""For a run that is being ended to save where it stands."""
POLL_SECONDS = 0.2


def note_session(state: Path, session: int) -> None:
    """Record the session in which the services of a state folder live from now on."""
    (state / SESSION_NAME).write_text(str(session))


def find_leftovers(state: Path) -> list[int]:
    """Processes of the session that was recorded last."""
    try:
        session = int((state / SESSION_NAME).read_text())
    except (FileNotFoundError, ValueError):
        return []
    mark = f"{MARK}={state}".encode()
    pids = (int(each.name) for each in PROCESSES.iterdir() if each.name.isdigit())
    return [pid for pid in pids if _is_of(pid, session, mark)]


def end_leftovers(state: Path) -> int:
    """End them, those that do not listen after a while by force; returns how many there were.

    A run that is ended so has failed, not been canceled: automation launches it again.
    """
    found = find_leftovers(state)
    end = time.monotonic() + SECONDS
    for pid in found:
        _signal(pid, signal.SIGTERM)
    left = found
    while left and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        left = find_leftovers(state)
    for pid in left:
        _signal(pid, signal.SIGKILL)
    (state / SESSION_NAME).unlink(missing_ok=True)
    return len(found)


def _is_of(pid: int, session: int, mark: bytes) -> bool:
    try:
        return os.getsid(pid) == session and mark in _environment(pid)
    except OSError:
        return False


def _environment(pid: int) -> list[bytes]:
    """What a process was started with; empty for one that has ended."""
    return (PROCESSES / str(pid) / "environ").read_bytes().split(b"\0")


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
