"""Starts the workers of one machine, in the environment that torchrun gives its own.

    python -m recipes.launcher.local --workers 2 -- -m recipes.continued_pretraining --spec s.json

Those of one machine alone meet on the loopback interface and nowhere else; those of several, in a
store that the first machine's launcher has opened. torchrun itself opens one on every interface.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

from artifacts.program import lifetime
from artifacts.program.entry import INTERRUPTED
from recipes.launcher.cluster import LOOPBACK, opened_store
from recipes.spec import SECONDS_TO_SAVE

SECONDS_TO_END_TOGETHER = timedelta(seconds=300)
"""How long the first machine, which holds the store, waits for the others to end."""


def main() -> int:
    """Run workers on this machine alone, which meet on loopback."""
    lifetime.end_with_parent()
    parser = argparse.ArgumentParser(prog="recipes.launcher.local", description=__doc__)
    parser.add_argument(
        "--workers", type=number_from(1), required=True, help="processes on this machine"
    )
    parser.add_argument("program", nargs="+", help="after `--`: `-m module` or a script, arguments")
    options = parser.parse_args()
    interruption = lifetime.Interruption()
    with opened_store(LOOPBACK.address) as port:
        environment = os.environ | LOOPBACK.meeting({}, port)
        return run_workers(options.program, options.workers, environment, interruption)


def number_from(least: int) -> Callable[[str], int]:
    """Reads an option that counts something; no processes at all would be a success at once."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"has to be a number from {least}, not {text!r}")
        return int(text)

    return read


def run_workers(
    program: Sequence[str],
    count: int,
    environment: Mapping[str, str],
    interruption: lifetime.Interruption,
    machine: int = 0,
    machines: int = 1,
) -> int:
    """Run the workers of one machine to their end; returns one exit code for all of them.

    They meet by `Interface.meeting`, a part of the environment. Each machine has as many workers.
    """
    # Threads of all workers together are as many as there are processors.
    threads = max(1, len(os.sched_getaffinity(0)) // count)
    shared = {
        # Before the environment, which may set another number.
        "OMP_NUM_THREADS": str(threads),
        **environment,
        "WORLD_SIZE": str(machines * count),
        "LOCAL_WORLD_SIZE": str(count),
        "GROUP_RANK": str(machine),
    }
    ranks = ({"RANK": str(machine * count + n), "LOCAL_RANK": str(n)} for n in range(count))
    workers = [
        lifetime.Child([sys.executable, *program], environment=shared | rank) for rank in ranks
    ]
    codes = lifetime.wait_for_all(workers, interruption, SECONDS_TO_SAVE)
    if not any(codes):
        if machines > 1:
            _wait_for_machines(environment, machine, machines)
        return 0
    if interruption.requested or INTERRUPTED in codes:
        return INTERRUPTED
    # SIGTERM does not count: the others are ended with it once one has failed.
    killed = [code for code in codes if code < 0 and code != -signal.SIGTERM]
    if killed:
        print(
            f"A training worker was killed by signal {-killed[0]}. Start the same command again: "
            "it goes on from the newest checkpoint.",
            file=sys.stderr,
        )
    return 1


def _wait_for_machines(environment: Mapping[str, str], machine: int, machines: int) -> None:
    """Return once the workers of all machines have ended, as the store ends with the first one."""
    with lifetime.importing():
        from torch.distributed import DistError, TCPStore

    with suppress(DistError):
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False)
        store.set(f"ended/{machine}", "")
        if machine == 0:
            store.wait([f"ended/{n}" for n in range(machines)], SECONDS_TO_END_TOGETHER)


if __name__ == "__main__":
    sys.exit(main())
