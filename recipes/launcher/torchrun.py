"""torchrun for several machines, with one addition: exit code 75 is kept.

Takes its arguments: `python -m recipes.launcher.torchrun --nnodes=2 --node-rank=0 …`. Its
rendezvous listens on every interface, so the network between the machines has to be private.
"""

import logging
import os
import sys

from artifacts.program.entry import INTERRUPTED
from recipes.launcher.local import failure_code


def main() -> int:
    """Run this machine's workers and return their common exit code."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)
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


if __name__ == "__main__":
    sys.exit(main())
