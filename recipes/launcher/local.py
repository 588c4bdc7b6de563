"""Starts the workers of one machine, in the environment that torchrun gives its own.

    python -m recipes.launcher.local --workers 2 -- -m recipes.continued_pretraining --spec s.json

Those of one machine alone meet on the loopback interface and nowhere else; those of several, in a
store that the first machine's launcher has opened. torchrun itself opens one on every interface.
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

from artifacts.program.entry import INTERRUPTED
from artifacts.program.lifetime import (
    Child,
    Interruption,
    end_with_parent,
    importing,
    wait_for_all,
)
from recipes.launcher.cluster import GLOO_VARIABLE, JOIN_VARIABLES, NCCL_VARIABLE, opened_store
from recipes.spec import SECONDS_TO_SAVE

LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo"
SECONDS_TO_END_TOGETHER = timedelta(seconds=300)


def main() -> int:
    """Run the workers to their end and return one exit code for all of them."""
    end_with_parent()
    options = _parse()
    interruption = Interruption()
    with _store(options.store) as (address, port):
        place = {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
        if not options.store:
            place |= {GLOO_VARIABLE: LOOPBACK_INTERFACE, NCCL_VARIABLE: LOOPBACK_INTERFACE}
        workers = [
            Child(
                [sys.executable, *options.program],
                environment=os.environ | place | _environment(rank, options),
            )
            for rank in range(options.workers)
        ]
        codes = wait_for_all(workers, interruption, SECONDS_TO_SAVE)
        if options.store and not any(codes):
            _wait_for_machines(address, port, options)
    if not any(codes):
        return 0
    return INTERRUPTED if interruption.requested else failure_code(codes)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="recipes.launcher.local", description=__doc__)
    parser.add_argument("--workers", type=int, required=True, help="processes on this machine")
    parser.add_argument("--machine", type=int, default=0, help="its number, from 0")
    parser.add_argument("--machines", type=int, default=1, help="how many there are")
    parser.add_argument("--store", help="address:port where the workers of several machines meet")
    parser.add_argument("program", nargs="+", help="after `--`: `-m module` or a script, arguments")
    return parser.parse_args()


@contextmanager
def _store(given: str | None) -> Iterator[tuple[str, int]]:
    if given:
        address, _, port = given.rpartition(":")
        yield address, int(port)
        return
    with opened_store(LOOPBACK) as bound:
        yield LOOPBACK, bound


def _environment(local_rank: int, options: argparse.Namespace) -> dict[str, str]:
    # Threads of all workers together are as many as there are processors.
    threads = max(1, len(os.sched_getaffinity(0)) // options.workers)
    return {
        "RANK": str(options.machine * options.workers + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(options.machines * options.workers),
        "LOCAL_WORLD_SIZE": str(options.workers),
        "GROUP_RANK": str(options.machine),
        **JOIN_VARIABLES,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
    }


def _wait_for_machines(address: str, port: int, options: argparse.Namespace) -> None:
    """Return once the workers of all machines have ended, as the store ends with the first one."""
    with importing():
        from torch.distributed import DistError, TCPStore

    with suppress(DistError):
        store = TCPStore(address, port, is_master=False)
        store.set(f"ended/{options.machine}", "")
        if options.machine == 0:
            store.wait([f"ended/{n}" for n in range(options.machines)], SECONDS_TO_END_TOGETHER)


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
