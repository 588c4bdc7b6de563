"""Starts the workers of one machine; they meet on the loopback interface and nowhere else.

    python -m recipes.launcher.local --workers 2 -- -m recipes.continued_pretraining --spec s.json

torchrun is for several machines.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from artifacts.program.entry import INTERRUPTED
from artifacts.program.lifetime import PARENT_VARIABLE, end_with_parent
from recipes.launcher.rendezvous import JOIN_VARIABLES, opened_store
from recipes.spec import SECONDS_TO_SAVE

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
POLL_SECONDS = 0.1


def main() -> int:
    """Run the workers to their end and return one exit code for all of them."""
    end_with_parent()
    parser = argparse.ArgumentParser(prog="recipes.launcher.local", description=__doc__)
    parser.add_argument("--workers", type=int, required=True, help="processes on this machine")
    parser.add_argument("program", nargs="+", help="after `--`: `-m module` or a script, arguments")
    options = parser.parse_args()
    with _signals() as received, opened_store(LOOPBACK) as port:
        workers = [
            subprocess.Popen(
                [sys.executable, *options.program],
                env=os.environ | _environment(rank, options.workers, port),
            )
            for rank in range(options.workers)
        ]
        codes = _wait(workers, received)
    return _exit_code(codes, interrupted=bool(received))


def _environment(rank: int, workers: int, port: int) -> dict[str, str]:
    # Threads of all workers together are as many as there are processors.
    threads = max(1, len(os.sched_getaffinity(0)) // workers)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        **JOIN_VARIABLES,
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        PARENT_VARIABLE: str(os.getpid()),
    }


@contextmanager
def _signals() -> Iterator[list[int]]:
    """The termination signals that came while the block runs."""
    received: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        received.append(number)

    before = {number: signal.signal(number, remember) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(workers: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> list[int]:
    """The exit codes of all; once one fails or a signal comes, the others are asked to save."""
    deadline: float | None = None
    while any(worker.poll() is None for worker in workers):
        if deadline is None and (received or any(worker.returncode for worker in workers)):
            deadline = time.monotonic() + SECONDS_TO_SAVE
            _signal_all(workers, signal.SIGTERM)
        elif deadline is not None and time.monotonic() > deadline:
            _signal_all(workers, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return [worker.returncode for worker in workers]


def _signal_all(workers: Sequence[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for worker in workers:
        worker.send_signal(number)


def _exit_code(codes: Sequence[int], interrupted: bool) -> int:
    if not any(codes):
        return 0
    return INTERRUPTED if interrupted else failure_code(codes)


def failure_code(codes: Sequence[int]) -> int:
    """One exit code for workers of which some failed; a worker killed by a signal is named."""
    if INTERRUPTED in codes:
        return INTERRUPTED
    # Once one has failed, the others are ended with SIGTERM.
    killed = [code for code in codes if code < 0 and code != -signal.SIGTERM]
    if killed:
        print(
            f"A training worker was killed by signal {-killed[0]}. Start the same command again: "
            "it goes on from the newest checkpoint.",
            file=sys.stderr,
        )
    return 1


if __name__ == "__main__":
    sys.exit(main())
