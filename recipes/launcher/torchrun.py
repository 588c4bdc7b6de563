"""torchrun for several machines, with two additions: exit code 75 is kept, and it opens no door.

Takes torchrun's arguments, with `--rdzv-backend=launcher` for a store that the first machine's
launcher has opened; torchrun's own backends open one on every interface.
"""

import logging
import os
import sys

from artifacts.program.entry import INTERRUPTED
from artifacts.program.lifetime import importing
from recipes.launcher.local import failure_code

with importing():
    from torch.distributed import Store, TCPStore, run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import (
        RendezvousInfo,
        RendezvousParameters,
        rendezvous_handler_registry,
    )
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

BACKEND = "launcher"


class JoinedRendezvous(StaticTCPRendezvous):
    """Machines whose ranks are given, meeting in a store that is there already."""

    _store: Store | None

    def get_backend(self) -> str:
        """What `--rdzv-backend` calls it."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the store, and wait in it for the others."""
        if self._store is None:
            self._store = TCPStore(
                self.master_addr, self.master_port, is_master=False, timeout=self.timeout
            )
        return super().next_rendezvous()


def main() -> int:
    """Run this machine's workers and return their common exit code."""
    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
    rendezvous_handler_registry.register(BACKEND, _join)
    arguments = run.parse_args(sys.argv[1:])
    if arguments.nproc_per_node.isdecimal():
        # torchrun by itself would leave every worker but a single one with one thread.
        threads = max(1, len(os.sched_getaffinity(0)) // int(arguments.nproc_per_node))
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    try:
        run.run(arguments)
    except ChildFailedError as error:
        return failure_code([failure.exitcode for failure in error.failures.values()])
    except SignalException:
        return INTERRUPTED
    return 0


def _join(parameters: RendezvousParameters) -> JoinedRendezvous:
    address, _, port = parameters.endpoint.rpartition(":")
    return JoinedRendezvous(
        address,
        int(port),
        int(parameters.config["rank"]),
        parameters.max_nodes,
        parameters.run_id,
        int(parameters.config["timeout"]),
    )


if __name__ == "__main__":
    sys.exit(main())
