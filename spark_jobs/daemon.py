"""Starts Spark's Python workers with all their imports done, once, before they are forked.

Takes the place of `pyspark.daemon` in local sessions (`spark.python.daemon.module`), which imports
pyspark from an archive, compiling it each time, and leaves every worker to import the rest.
"""

import gc
import io
import socket
import sys
from typing import Any, BinaryIO


class PromptReader(io.RawIOBase):
    """Reads what Spark sends to a worker, and acknowledges it at once.

    Java sends each task in two pieces and holds the second back until the first is acknowledged
    (Nagle's algorithm), which Linux puts off for 40 ms, in case there is something to answer.
    """

    def __init__(self, file: io.BufferedReader) -> None:
        self._file = file
        self._socket = socket.fromfd(file.fileno(), socket.AF_INET, socket.SOCK_STREAM)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        # The kernel takes it back after a while, so it is asked for every time.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
        return self._file.readinto1(buffer)

    def close(self) -> None:
        self._socket.close()
        super().close()


def main() -> None:
    """Serve Spark until its end, as `pyspark.daemon` does."""
    sys.path[:] = [path for path in sys.path if not path.endswith(".zip")]
    from pyspark import daemon
    from pyspark.worker import main as run_task

    import spark_jobs.decisions
    import spark_jobs.prepare
    import spark_jobs.tasks  # noqa: F401

    def run_task_promptly(received: io.BufferedReader, sent: BinaryIO) -> None:
        with io.BufferedReader(PromptReader(received), io.DEFAULT_BUFFER_SIZE * 8) as prompt:
            run_task(prompt, sent)

    if hasattr(socket, "TCP_QUICKACK"):
        daemon.worker_main = run_task_promptly
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
