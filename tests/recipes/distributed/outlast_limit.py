"""One of two workers: waits for the other for longer than the group that trains allows."""

import sys
from datetime import timedelta
from pathlib import Path
from threading import Thread

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from recipes.distributed.workers import join_workers, leave_workers
from tests.waiting import wait_until


def main() -> None:
    folder = Path(sys.argv[1])
    workers = join_workers()
    _set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    if workers.is_rank_zero:
        wait_until((folder / "limit").exists)
        workers.barrier()
    else:
        waiting = Thread(target=workers.barrier)
        waiting.start()
        try:
            dist.all_reduce(torch.zeros(1))
        except RuntimeError:
            assert waiting.is_alive()
            (folder / "limit").touch()
        waiting.join()
    (folder / f"met-{workers.rank}").touch()
    leave_workers()


if __name__ == "__main__":
    main()
