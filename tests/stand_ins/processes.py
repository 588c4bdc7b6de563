"""Real child processes, each in a session of its own, that end with this process."""

import contextlib
import errno
import itertools
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
INHERITED = ("PATH", "HOME", "TMPDIR", "LANG", "OMP_NUM_THREADS", "VIRTUAL_ENV")

FIRST_PORT, PORTS_OF_A_WORKER, WORKERS = 20_000, 2_000, 6
"""All below 32,768, from where on Linux gives ports to those who do not say which."""
_numbers = itertools.count(os.getpid())
"""Two processes of one worker, or of two checkouts, are not likely to begin at the same port."""
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="starter")
"""The kernel counts a thread's end for the parent's, and this one lives as long as the process."""


def start_process(
    command: Sequence[str], death: signal.Signals = signal.SIGKILL, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a process that gets a signal when this one ends, be it by kill -9 (Linux).

    It has a session of its own, so that an interruption from a terminal reaches first what uses it.

    Args:
        options: of `subprocess.Popen`.
    """
    bound = ["setpriv", "--pdeathsig", death.name, *command]
    start = _starter.submit(subprocess.Popen, bound, start_new_session=True, **options)
    return start.result()


def free_port() -> int:
    """A port of loopback that nobody listens on, and that was not given before.

    The kernel gives it to nobody who asks for any port, and other workers of the tests have others:
    it may take long until somebody listens on it.
    """
    for number in itertools.islice(_numbers, PORTS_OF_A_WORKER):
        port = FIRST_PORT + _worker() * PORTS_OF_A_WORKER + number % PORTS_OF_A_WORKER
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(errno.EADDRINUSE, "somebody listens on every port that these tests may use")


def _worker() -> int:
    """This process's number among those that pytest-xdist has started, or 0."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS


@dataclass(frozen=True)
class LocalImage:
    """What stands for a container image: a folder, an entry point and its environment."""

    root: Path = REPOSITORY
    entrypoint: Sequence[str] = (sys.executable,)
    environment: Mapping[str, str] = field(default_factory=dict)

    def place(self, here: Path, there: str) -> str:
        """Where a program of the image finds a folder of this machine.

        Args:
            there: where Google has it.
        """
        return str(here)

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        folders: Mapping[Path, str],
    ) -> "RealProcess":
        """Start a program of the image.

        Args:
            environment: the whole of it, the image's own included.
            folders: of this machine, and the `place` of each.
        """
        return RealProcess(command, self.root, environment, log)


class RealProcess:
    """A process started by a stand-in; ended by its own group id, never by name."""

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str], log: Path
    ) -> None:
        inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
        self.log_path = log
        with log.open("ab") as output:
            self._process = start_process(
                command,
                cwd=folder,
                env=inherited | {"PYTHONUNBUFFERED": "1"} | dict(environment),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(timeout)

    def end(self, grace_seconds: float = 0.0) -> None:
        """SIGTERM and, after the grace, SIGKILL to the whole group."""
        if grace_seconds and self.poll() is None:
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_seconds)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def log(self) -> str:
        """Everything it has written so far."""
        return self.log_path.read_text(errors="replace")
