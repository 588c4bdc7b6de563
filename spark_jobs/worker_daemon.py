"""Forks Spark's Python workers from a process that has already imported what the stages need.

Takes the place of `pyspark.daemon` (`spark.python.daemon.module`), which still does the work. With
two workers, this saves half a second of processor time per session, and 0.08 s of waiting per
task.
"""

import gc
import os
import socket
import sys
from typing import IO

# Spark has its workers look for modules in a zip of pyspark and in its largest jar. Their lists of
# files are read again for every task, a dozen times, which takes 0.13 s; pyspark is installed, too.
sys.path = [path for path in sys.path if not path.endswith((".zip", ".jar"))]
sys.path_importer_cache.clear()

import fsspec  # noqa: E402, F401 - as what follows: imported for the workers
import ftfy  # noqa: E402, F401
import pandas  # noqa: E402, F401 - by pyarrow, as soon as it is given a list
from pyspark import daemon  # noqa: E402

import spark_jobs.clean.job  # noqa: E402
import spark_jobs.tokenize.job  # noqa: E402, F401

_work = daemon.worker_main


def work_on_task(received: IO[bytes], sent: IO[bytes]) -> None:
    """Run a task that Java sends.

    Java sends it in small pieces, and each waits until the previous one is acknowledged (John
    Nagle's algorithm, RFC 896), which Linux delays by 40 ms if nothing is sent back.
    """
    if sys.platform == "linux":
        with socket.socket(fileno=os.dup(received.fileno())) as connection:
            # Linux clears the option as soon as something is sent, so every task sets it.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    _work(received, sent)


if __name__ == "__main__":
    daemon.worker_main = work_on_task
    # Workers collect garbage after every task. What was imported is none, and scanning it would
    # take 0.05 s.
    gc.freeze()
    daemon.manager()
