"""Keeps two makers of the same artifact apart."""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from artifacts.errors import LeaseLost
from artifacts.leases.holder import describe_holder

POLL_SECONDS = 0.5


class Lease(Protocol):
    """What a maker holds while it makes something."""

    def check(self) -> None:
        """Raise LeaseLost where another may have taken over."""


class LocalLease:
    """A lock on a file; it is lost only where somebody removes the file."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path, self._file = path, file

    def check(self) -> None:
        """Raise LeaseLost where the lock file is no longer the one that this process locked."""
        if not _is_same(self._path, self._file):
            raise LeaseLost(f"The lock {self._path} was removed or replaced.")


@contextmanager
def local_lease(path: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[LocalLease]:
    """Hold an exclusive lease on a local path, waiting for whoever holds it.

    The operating system's file lock is the lease: it ends with its holder, a killed one included,
    so nobody waits for the dead.

    Args:
        path: the lock file; made if absent, left in place afterwards.
        on_wait: called once with the holder's description if the lease is taken.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path, on_wait) as file:
        file.seek(0)
        file.truncate()
        file.write(describe_holder())
        file.flush()
        yield LocalLease(path, file)


def _lock(path: Path, on_wait: Callable[[str], None] | None) -> IO[str]:
    """The lock file, locked; who had to wait for one that was removed meanwhile begins again."""
    waited = False
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same(path, file):
                return file
        except BlockingIOError:
            if on_wait and not waited:
                file.seek(0)
                on_wait(file.read().strip() or "another process")
            waited = True
            time.sleep(POLL_SECONDS)
        file.close()


def _is_same(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Whether somebody holds the lease on a local path just now."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
