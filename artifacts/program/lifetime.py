"""Ending on request with everything saved, and with the process that waits for us."""

import ctypes
import os
import signal
from types import FrameType

PR_SET_PDEATHSIG = 1
"""From Linux' `sys/prctl.h`."""
LIBC = ctypes.CDLL(None)
PARENT_VARIABLE = "LLM_ASSETS_PARENT_PID"
"""Set by whoever starts a program that shall not outlive it: its own process id."""


class Interruption:
    """Remembers that SIGTERM or SIGINT came, so that the loop ends at a step's end."""

    def __init__(self) -> None:
        self.signal_name: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    @property
    def requested(self) -> bool:
        """True once a signal came."""
        return self.signal_name is not None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """End with the process that PARENT_VARIABLE names, which started this one; else do nothing.

    Linux sends the signal when the parent dies, be it by kill -9; SIGKILL ends a process that
    stands still, too. A parent that died before this call
    is noticed by its place having been taken.

    Raises:
        SystemExit: the parent is gone already.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    signal_parents_death(number)
    if os.getppid() != int(parent):
        raise SystemExit("The process that started this one has ended.")


def signal_parents_death(number: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent is gone, by whatever way (Linux
    alone); between fork and exec it holds for the program that is begun."""
    LIBC.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
