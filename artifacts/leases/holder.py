"""Who holds a lease: enough to name the process, and to see from its own machine that it died."""

import json
import os
import socket
from pathlib import Path

PROCESSES = Path("/proc")
BOOT = PROCESSES / "sys/kernel/random/boot_id"


def describe_holder() -> str:
    """This process as a lease's content."""
    return json.dumps(
        {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "started": process_started(os.getpid()),
            "processes_of": _process_table(),
        }
    )


def is_gone(description: str) -> bool:
    """Whether the holder described has ended for certain.

    True only if it ran where this process runs (same start of the machine, same process table) and
    no process of its number and starting time is there any more. False where nobody can tell.
    """
    try:
        holder = json.loads(description)
        process, started = int(holder["process"]), holder["started"]
        table = holder["processes_of"]
    except (ValueError, KeyError, TypeError):
        return False
    if table is None or table != _process_table():
        return False
    return started is not None and process_started(process) != started


def process_started(process: int) -> str | None:
    """When a process started, in the kernel's ticks; None where it does not run or can't be seen.

    Ticks, since the time of day is set again now and then. A process that ended and that its parent
    has not noticed counts as not running.
    """
    try:
        fields = (PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    state, started = fields[0], fields[19]
    return None if state in "ZX" else started


def _process_table() -> str | None:
    """Names the running kernel and this process's view of its processes; None without /proc.

    Containers of one machine have one kernel and different views.
    """
    try:
        view = os.readlink(PROCESSES / "self/ns/pid")
        return f"{BOOT.read_text().strip()} {view}"
    except OSError:
        return None
