"""The lives of processes: one keeper starts, watches and ends a child with all that it started.

    python -m artifacts.program.lifetime PROGRAM ...

becomes another program, which ends with the process that started this one.

A program imports in no more time than it has to, and has a temporary folder of its own. Spark,
torch, Dagster Pipes and multiprocessing put folders there, and remove them where they end well.
After kill -9 nobody would know whose they are, so what killed programs left is removed by whoever
comes next.
"""

import ctypes
import faulthandler
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import IO, Self

from artifacts.errors import UserError

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""From `sys/prctl.h` of Linux."""
LIBC = ctypes.CDLL(None)
PARENT_VARIABLE = "LLM_ASSETS_PARENT_PID"
"""Set by whoever starts a program that shall not outlive it: its own process id."""
BY_WAY_OF_THIS = (sys.executable, "-m", "artifacts.program.lifetime")
POLL_SECONDS = 0.05
END_SECONDS = 8.0
"""That descendants may take to end when they are asked to."""
KILL_SECONDS = 1.0
"""That they may take when they are killed; what waits for a disk may take for ever."""


class Child:
    """A program that this process started, in a process group of its own.

    So Ctrl-C in a terminal reaches it by way of this process alone, and what it starts is ended
    with it. It ends with this process, too, be that by kill -9, unless it is to outlive it.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | int | None = None,
        descriptors: Sequence[int] = (),
        heeds_parent: bool = True,
        outlives_parent: bool = False,
    ) -> None:
        """Start it; raises UserError where there is no such program.

        Args:
            environment: all its variables; None gives it this process's.
            output: gets its standard output and error; None leaves them where this process's go.
            descriptors: open ones that it inherits.
            heeds_parent: whether it calls `end_with_parent` itself; another program is started by
                way of this module, which does.
            outlives_parent: start it in a session of its own, and let it stay.
        """
        variables = {**(os.environ if environment is None else environment)}
        # It may name this process's own parent.
        variables.pop(PARENT_VARIABLE, None)
        # Looked for here: by way of this module, the start would succeed, and only its end would
        # tell that the program is absent.
        if shutil.which(command[0], path=variables.get("PATH")) is None:
            raise UserError(f"There is no program {command[0]!r} here.")
        if not outlives_parent:
            variables[PARENT_VARIABLE] = str(os.getpid())
            command = command if heeds_parent else [*BY_WAY_OF_THIS, *command]
        # Without input: in a group of its own, a program that reads from the terminal is stopped.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            env=variables,
            pass_fds=descriptors,
            start_new_session=outlives_parent,
            process_group=None if outlives_parent else 0,
        )
        self.pid = self._process.pid
        self._reaping = threading.RLock()
        """Two threads may wait for it: one of them reaps it, and nobody signals it afterwards."""

    def poll(self) -> int | None:
        """Its exit code, below 0 the signal that ended it; None while it runs.

        Once it has ended, so has whatever of its group it left behind.
        """
        # WNOWAIT leaves it unreaped until its group is killed: until then, its pid cannot be
        # reused.
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with self._reaping:
            if self._process.returncode is None and os.waitid(os.P_PID, self.pid, flags):
                self._kill_group()
                self._process.wait()
            return self._process.returncode

    def wait(self, seconds: float = float("inf")) -> int | None:
        """Its exit code, or None where it still runs after some seconds."""
        end = time.monotonic() + seconds
        while (code := self.poll()) is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)
        return code

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs."""
        with self._reaping:
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it and its group at once."""
        with self._reaping:
            if self.poll() is None:
                self._kill_group()

    def end(self, seconds: float) -> int:
        """Ask it to end, and end it after some seconds; returns its exit code."""
        self.signal(signal.SIGTERM)
        # To a program that is stopped, the signal comes only once it continues.
        self.signal(signal.SIGCONT)
        if self.wait(seconds) is None:
            self.kill()
        code = self.wait()
        assert code is not None, "it was waited for without a limit"
        return code

    def _kill_group(self) -> None:
        with suppress(ProcessLookupError):
            # It was started in a new group, whose number is its own.
            os.killpg(self.pid, signal.SIGKILL)


class Interruption:
    """Remembers that SIGTERM or SIGINT came, so that the loop ends at a step's end.

    A handler that raised would be lost where Python runs a callback of its own just then.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    @property
    def requested(self) -> bool:
        """True once a signal came."""
        return self.signal_name is not None

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.signal_name = signal.Signals(number).name


class Watchdog:
    """Within its block, ends this process where that stands still, which its log then shows.

    It ends without its closing message, so whoever started it takes it for killed, and starts it
    again.
    """

    def __init__(self, seconds: float, reason: str) -> None:
        """Expect `progress` at least every so many seconds; `reason` is told where none comes."""
        self._seconds, self._reason = seconds, reason
        self._is_over, self._count = threading.Event(), 0

    def __enter__(self) -> Self:
        # A thread, since a signal's handler would wait for the call that does not return.
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def progress(self) -> None:
        """Say that the work goes on."""
        self._count += 1

    def _watch(self) -> None:
        # A hundred waits are counted and no clock is read, which goes on while this process is
        # stopped: by a person, a debugger, or with its machine.
        seen = waits = 0
        while waits < 100:
            if self._is_over.wait(min(self._seconds / 100, threading.TIMEOUT_MAX)):
                return
            count = self._count
            seen, waits = count, waits + 1 if count == seen else 0
        print(f"{self._reason} The stacks of its threads:", file=sys.stderr, flush=True)
        faulthandler.dump_traceback()
        os._exit(1)


def wait_for_all(
    children: Sequence[Child], interruption: Interruption, seconds_to_end: float
) -> list[int]:
    """The exit codes of all; once one fails or this process is told to end, all are asked to, and
    are killed where they take longer than some seconds."""
    deadline = float("inf")
    while None in (codes := [child.poll() for child in children]):
        if deadline == float("inf") and (interruption.requested or any(codes)):
            deadline = time.monotonic() + seconds_to_end
            for child in children:
                child.signal(signal.SIGTERM)
        for child in children if time.monotonic() > deadline else ():
            child.kill()
        time.sleep(POLL_SECONDS)
    return [code for code in codes if code is not None]


def run_to_end(command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
    """Run a program until it ends, or this process does; returns what it said and its exit code."""
    return subprocess.run(
        [*BY_WAY_OF_THIS, *command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
        text=True,
        errors="replace",
    )


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by {signal.Signals(-code).name}"


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """End with the process that PARENT_VARIABLE names, which started this one; else do nothing.

    Linux sends the signal when the parent dies, be it by kill -9, also to a program that this one
    then becomes; SIGKILL ends a process that stands still, too. A parent that died before this call
    is noticed by its place having been taken, and raises SystemExit.
    """
    # Taken out, since what this program starts has another parent.
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    # In this order no death is missed: the other way round, that of a parent between the look and
    # the request would be neither seen nor signaled.
    LIBC.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != int(parent):
        raise SystemExit("The process that started this one has ended.")


def end_descendants_first(channel: int) -> None:
    """On SIGTERM, end what this process has started before it ends itself.

    From now on, what a descendant leaves behind becomes a child of this process. The channel, a
    descriptor, is closed before, so that whoever is at its other end expects nothing more.
    """
    # Not in the handler, which may interrupt another import.
    import psutil  # noqa: F401

    def end(number: int, frame: FrameType | None) -> None:
        with suppress(OSError):
            os.close(channel)
        end_descendants()
        # The code by which shells tell that a signal has ended a program.
        os._exit(128 + number)

    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, end)


def end_descendants() -> None:
    """Ask what this process has started, and what that has, to end; end it after some seconds.

    Each is asked itself, once: a shell does not pass a signal on, and what a descendant starts in
    order to end, such as `docker stop`, is given the time. From here on this process ignores
    SIGTERM.
    """
    import psutil

    signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def running() -> list[psutil.Process]:
        processes = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                processes += [process] if process.status() != psutil.STATUS_ZOMBIE else []
        return processes

    deadline = time.monotonic() + END_SECONDS
    for process in running():
        # A process of another user, such as one that sudo started, may not be signaled.
        with suppress(psutil.Error):
            process.terminate()
            # To a program that is stopped, the signal comes only once it continues.
            process.resume()
    while (survivors := running()) and time.monotonic() < deadline + KILL_SECONDS:
        for process in survivors if time.monotonic() > deadline else ():
            with suppress(psutil.Error):
                process.kill()
        time.sleep(POLL_SECONDS)


@contextmanager
def importing() -> Iterator[None]:
    """Import within this block: what modules make stays for good, and is never garbage.

    Looking for garbage among it is a quarter of the time that importing torch and transformers
    takes: a training starts in 4.5 seconds of a processor in place of 6.5.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


PREFIX = "llm-assets-"
HOLDER_NAME = "holder.json"
LAST = -101
"""When the folder is removed, as multiprocessing counts: after the folder of its own, at -100."""


def use_own_temporary_folder() -> None:
    """Have this process, and what it starts, use a temporary folder of its own.

    It lies in the usual one (`TMPDIR`), and is removed when the process ends. Where it was killed,
    the next process that calls this removes it. Where none can be made, as on a full disk, all
    stays as it is.
    """
    # Imported here, for what becomes another program at once needs none of it.
    from artifacts.leases import describe_holder, is_gone

    # `tempfile` caches its first answer; without that, TMPDIR is read again.
    tempfile.tempdir = None
    # Whoever needs a temporary file later meets the same fault, and reports it.
    with suppress(OSError):
        place = Path(tempfile.gettempdir())
        holder = _holder(place)
        if holder == describe_holder():
            return
        if holder is not None:
            # The folder belongs to the program that started this one, which may end first.
            place = place.parent
        for folder in place.glob(f"{PREFIX}*"):
            # One without a holder stays: its program may be about to write who it is.
            if is_gone(_holder(folder) or ""):
                shutil.rmtree(folder, ignore_errors=True)
        own_folder = tempfile.mkdtemp(prefix=PREFIX, dir=place)
        # Does nothing in a process that was forked from this one. Before the holder's file, so
        # that the folder goes even where a full disk keeps that from being written.
        Finalize(None, shutil.rmtree, (own_folder,), {"ignore_errors": True}, LAST)
        Path(own_folder, HOLDER_NAME).write_text(describe_holder())
        os.environ["TMPDIR"] = tempfile.tempdir = own_folder


def _holder(folder: Path) -> str | None:
    """Whose folder it is; None of one that is no program's, or another user's."""
    path = folder / HOLDER_NAME
    try:
        return path.read_text() if path.stat().st_uid == os.geteuid() else None
    except OSError:
        return None


if __name__ == "__main__":
    end_with_parent()
    try:
        os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606
    except OSError as failure:
        sys.exit(f"{sys.argv[1]} cannot be started: {failure.strerror}")
