"""Ending on request with everything saved, and with the process that waits for us."""

import ctypes
import signal
from types import FrameType

PR_SET_PDEATHSIG = 1


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


def end_with_parent() -> None:
    """Ask Linux for a SIGTERM when the parent dies, be it by kill -9; no-op elsewhere."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    except (OSError, AttributeError):
        return
