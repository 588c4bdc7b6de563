"""Keeps two makers of the same artifact apart."""

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from artifacts.holder import describe_holder

POLL_SECONDS = 0.5


@contextmanager
def local_lease(path: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Hold an exclusive lease on a local path, waiting for whoever holds it.

    The operating system's file lock is the lease: it ends with its holder, a killed one included,
    so nobody waits for the dead.

    Args:
        path: the lock file; made if absent, left in place afterwards.
        on_wait: called once with the holder's description if the lease is taken.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        waited = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if on_wait and not waited:
                    file.seek(0)
                    on_wait(file.read().strip() or "another process")
                waited = True
                time.sleep(POLL_SECONDS)
        file.seek(0)
        file.truncate()
        file.write(describe_holder())
        file.flush()
        yield
