"""Memory of a process and all its children."""

import threading
import time
from types import TracebackType

import psutil

SAMPLE_SECONDS = 0.5


def family_memory(pid: int) -> float:
    """Bytes of a process with all its children, as the sum of proportional set sizes.

    What several processes map is shared out among them.
    """
    total = 0.0
    try:
        family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    for process in family:
        try:
            total += process.memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total


class PeakMemory:
    """Samples this process while a block runs, alone and with its children; peaks in bytes."""

    def __init__(self, family_seconds: float = SAMPLE_SECONDS) -> None:
        """Sample the children so many seconds apart."""
        self._family_seconds = family_seconds
        self.own = self.family = 0.0
        self._process = psutil.Process()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        next_of_family = 0.0
        while True:
            self.own = max(self.own, self._process.memory_full_info().pss)
            if time.monotonic() >= next_of_family:
                self.family = max(self.family, family_memory(self._process.pid))
                next_of_family = time.monotonic() + self._family_seconds
            if self._ended.wait(SAMPLE_SECONDS):
                return
