"""Ends a job that nobody looks after: whose lease in the store was not renewed for too long.

Whoever follows the job renews it. So machines end by themselves where Dagster is gone for good.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from artifacts.storage import files

LEASE_VARIABLE = "JOB_LEASE"
SECONDS_VARIABLE = "JOB_LEASE_SECONDS"
LONGEST_POLL_SECONDS = 60.0


def watch_lease(environment: Mapping[str, str]) -> None:
    """Have this process told to end (SIGTERM) once the lease it is given has run out, if any.

    A lease runs from its last change, by this machine's own clock; also while it cannot be read.
    """
    if url := environment.get(LEASE_VARIABLE):
        seconds = float(environment[SECONDS_VARIABLE])
        threading.Thread(target=_watch, args=(url, seconds), daemon=True).start()


def _watch(url: str, seconds: float) -> None:
    content, changed = None, time.monotonic()
    while time.monotonic() - changed < seconds:
        time.sleep(min(LONGEST_POLL_SECONDS, seconds / 4))
        # Whatever keeps the store from being read, the next look may find it.
        with suppress(Exception):
            if (found := files.find(url)) != content:
                content, changed = found, time.monotonic()
    print(
        f"No run has renewed {url} for {seconds:,.0f} s: this job saves its state and ends. "
        "Materialize the asset again: it goes on from its newest checkpoint.",
        file=sys.stderr,
        flush=True,
    )
    os.kill(os.getpid(), signal.SIGTERM)
