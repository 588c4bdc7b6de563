"""Starts the workers of one machine; they meet on the loopback interface and nowhere else.

    python -m recipes.launcher.local --workers 2 -- -m recipes.continued_pretraining --spec s.json

torchrun is for several machines.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from artifacts.program.entry import INTERRUPTED
from artifacts.program.lifetime import Child, Interruption, end_with_parent, wait_for_all
from recipes.launcher.cluster import JOIN_VARIABLES, opened_store
from recipes.spec import SECONDS_TO_SAVE

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"


def main() -> int:
    """Run the workers to their end and return one exit code for all of them."""
    end_with_parent()
    parser = argparse.ArgumentParser(prog="recipes.launcher.local", description=__doc__)
    parser.add_argument("--workers", type=int, required=True, help="processes on this machine")
    parser.add_argument("program", nargs="+", help="after `--`: `-m module` or a script, arguments")
    options = parser.parse_args()
    interruption = Interruption()
    with opened_store(LOOPBACK) as port:
        workers = [
            Child(
                [sys.executable, *options.program],
                environment=os.environ | _environment(rank, options.workers, port),
            )
            for rank in range(options.workers)
        ]
        codes = wait_for_all(workers, interruption, SECONDS_TO_SAVE)
    if not any(codes):
        return 0
    return INTERRUPTED if interruption.requested else failure_code(codes)


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
    }


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
