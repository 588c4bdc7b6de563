"""torchrun, with two additions: exit code 75 is kept, and it ends with whoever started it.

Takes torchrun's own arguments: `python -m recipes.launch --standalone --nproc-per-node=2 -m …`.
"""

import logging
import os
import signal
import sys

from recipes.interruption import end_with_parent
from recipes.spec import INTERRUPTED_EXIT_CODE


def main() -> int:
    """Run the workers and return their common exit code."""
    end_with_parent()
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
        codes = [failure.exitcode for failure in error.failures.values()]
        return INTERRUPTED_EXIT_CODE if INTERRUPTED_EXIT_CODE in codes else _failure(codes)
    except SignalException:
        return INTERRUPTED_EXIT_CODE
    return 0


def _failure(codes: list[int]) -> int:
    # Once one has failed, torchrun itself ends the others with SIGTERM.
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
