"""Keeps two makers of the same artifact apart, on one machine or on several.

Who holds a lease is written into it: enough to name the process, and to see from its own machine
that it died.

For makers on different machines a lease is an object in Cloud Storage. It is made, renewed and
removed with generation preconditions, so at any time one holder at most succeeds. A waiting maker
takes over once the object has not changed for longer than its lifetime, which it measures on its
own clock: no two machines' clocks are compared. Where it can see that the holder's process has
ended, on the same machine, it need not wait so long.

What the holder commits passes through the lease object: it becomes the object's content, and
storage copies exactly that generation to where it belongs. A holder that slept past its lease has
no generation that storage would take.
"""

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from artifacts.errors import LeaseLost
from artifacts.storage import files

if TYPE_CHECKING:
    from google.cloud.storage import Blob


PROCESSES = Path("/proc")
BOOT = PROCESSES / "sys/kernel/random/boot_id"


def describe_holder(**more: str) -> str:
    """This process, and what else is to be said of it, as a lease's content."""
    process = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "started": process_started(os.getpid()),
        "processes_of": _process_table(),
    }
    return json.dumps(process | more)


def _describe_hold() -> str:
    """This process, which holds a lease from now on, as the lease's content."""
    return describe_holder(since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"))


def holder_in_words(description: str) -> str:
    """Who holds a lease by its content, for whoever waits: process, machine and since when."""
    try:
        holder = json.loads(description)
        who = f"process {holder['process']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        # A lock file is empty for a moment before its holder writes it; a lease object holds a
        # manifest while that is committed.
        return "another process"
    return f"{who} (since {holder['since']})" if "since" in holder else who


def is_gone(description: str) -> bool:
    """Whether the holder described has ended for certain.

    True only if it ran where this process runs (same start of the machine, same process table) and
    no process of its number and starting time is there any more. False where nobody can tell.
    """
    try:
        holder = json.loads(description)
        process, started = int(holder["process"]), holder["started"]
        table = holder["processes_of"]
    except (ValueError, KeyError, TypeError):
        return False
    if table is None or table != _process_table():
        return False
    return started is not None and process_started(process) != started


def process_started(process: int) -> str | None:
    """When a process started, in the kernel's ticks; None where it does not run or can't be seen.

    Ticks, since the time of day is set again now and then. A process that ended and that its parent
    has not noticed counts as not running.
    """
    try:
        # A program's name, in parentheses, may hold spaces and parentheses: fields are counted
        # after it.
        fields = (PROCESSES / str(process) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # Fields 3 and 22 of proc(5), where the name is the second.
    state, started = fields[0], fields[19]
    return None if state in "ZX" else started


def _process_table() -> str | None:
    """Names the running kernel and this process's view of its processes; None without /proc.

    Containers of one machine have one kernel and different views.
    """
    try:
        view = os.readlink(PROCESSES / "self/ns/pid")
        return f"{BOOT.read_text().strip()} {view}"
    except OSError:
        return None


POLL_SECONDS = 0.5


class Lease(Protocol):
    """What a maker holds while it makes something."""

    def check(self) -> None:
        """Raise LeaseLost where another may have taken over."""


class LocalLease:
    """A lock on a file; it is lost only where somebody removes the file."""

    def __init__(self, path: Path, file: IO[str]) -> None:
        self._path, self._file = path, file

    def check(self) -> None:
        """Raise LeaseLost where the lock file is no longer the one that this process locked."""
        if not _is_same(self._path, self._file):
            raise LeaseLost(f"The lock {self._path} was removed or replaced.")


@contextmanager
def local_lease(
    path: Path,
    on_wait: Callable[[str], None] | None = None,
    at_each_look: Callable[[], object] | None = None,
) -> Iterator[LocalLease]:
    """Hold an exclusive lease on a local path, waiting for whoever holds it.

    The operating system's file lock is the lease: it ends with its holder, a killed one included,
    so nobody waits for the dead.

    The lock file is made if absent, and left in place afterwards. If the lease is taken, `on_wait`
    is called once, with the holder in words, and `at_each_look` each time that it still is; what
    they raise ends the wait.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path, on_wait, at_each_look) as file:
        # Opened to append (`_lock`), and what the last holder wrote is still there.
        file.seek(0)
        file.truncate()
        file.write(_describe_hold())
        file.flush()
        yield LocalLease(path, file)


def _lock(
    path: Path,
    on_wait: Callable[[str], None] | None,
    at_each_look: Callable[[], object] | None,
) -> IO[str]:
    """The lock file, opened and locked; begins again where the file was removed meanwhile."""
    waited = False
    while True:
        # Not `w+`, which would empty the file of whoever holds it.
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Its holder may have removed it between our opening and locking: such a lock keeps
            # nobody out.
            if _is_same(path, file):
                return file
        except BlockingIOError:
            if on_wait and not waited:
                file.seek(0)
                on_wait(holder_in_words(file.read()))
            waited = True
            if at_each_look:
                at_each_look()
            time.sleep(POLL_SECONDS)
        file.close()


def _is_same(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Whether somebody holds the lease on a local path just now."""
    try:
        # Held until the file is closed. A maker that asks meanwhile is refused, and asks again
        # (`_lock`).
        with path.open("rb") as file:
            # A shared lock: two that look at once do not take each other for the holder.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


LIFETIME_SECONDS = 60.0
"""How long a dead holder keeps others waiting."""
ABANDONED_SECONDS = 30 * LIFETIME_SECONDS
OBJECT_POLL_SECONDS = 1.0
"""Between two looks of a waiting maker."""


@contextmanager
def object_lease(url: str, on_wait: Callable[[str], None] | None = None) -> Iterator["ObjectLease"]:
    """Hold the lease at `gs://bucket/name` while the block runs, renewing it all the time; raises
    LeaseLost where it was lost, as this machine was asleep or cut off for longer than its lifetime.

    If it is taken, `on_wait` is called once, with the holder in words.
    """
    blob = files.blob_of(url)
    lease = ObjectLease(url, blob, *_acquire(blob, on_wait))
    try:
        yield lease
    finally:
        lease.stop()
    if lease.lost:
        # Not reached where the block itself failed: its own error says more.
        lease.check()


def object_is_held(url: str) -> bool:
    """Whether there is a lease object, unless its holder has ended for certain.

    Of another machine's holder one cannot ask. It renews its lease several times a minute, so one
    that is `ABANDONED_SECONDS` old is nobody's, however far this machine's clock is off.
    """
    lease = files.read_dated(files.blob_of(url))
    if lease is None:
        return False
    content, _, written_at = lease
    return not is_gone(content.decode()) and time.time() - written_at < ABANDONED_SECONDS


def _acquire(blob: "Blob", on_wait: Callable[[str], None] | None) -> tuple[bytes, int]:
    """Take the lease; returns the object's content and generation."""
    last_generation, since = files.ABSENT, time.monotonic()
    has_announced = False
    while True:
        content, current = files.read_generation(blob)
        holder = (content or b"").decode(errors="replace")
        if current != last_generation:
            last_generation, since = current, time.monotonic()
        is_free = current == files.ABSENT or time.monotonic() - since > LIFETIME_SECONDS
        if is_free or is_gone(holder):
            hold = _describe_hold().encode()
            generation = files.write_generation(blob, hold, current)
            if generation is not None:
                return hold, generation
            # Another waiting maker was faster.
            continue
        if on_wait and not has_announced:
            on_wait(holder_in_words(holder))
        has_announced = True
        time.sleep(OBJECT_POLL_SECONDS)


class ObjectLease:
    """A lease that is held, and renewed until stopped."""

    def __init__(self, url: str, blob: "Blob", content: bytes, generation: int) -> None:
        self.lost = False
        self._url = url
        self._blob = blob
        self._content = content
        self._generation = generation
        self._renewed = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLost where the lease is lost, or was not renewed for its lifetime."""
        # Not asked of storage: past its lifetime another may take it at any moment, whatever is
        # there now.
        if self.lost or time.monotonic() - self._renewed > LIFETIME_SECONDS:
            self.lost = True
            # It stays lost: renewing ends, and `stop` leaves the object to whoever has it by then.
            raise LeaseLost(f"The lease {self._url} was lost: another maker may have taken over.")

    def commit(self, url: str, content: bytes) -> None:
        """Write an object that is not there yet, if this lease still holds, in one step; raises
        LeaseLost where another has taken over, or has written the object."""
        target = files.blob_of(url)
        with self._lock:
            # No renewal may come between this one and the copy, which names its generation.
            self._renew(content)
            self.check()
            # The lease object holds the content until the next renewal describes the holder again.
            if files.copy_new(self._blob, self._generation, target):
                return
        # An answer that was lost on its way is asked for again, and then finds the own copy.
        if files.read_generation(target)[0] != content:
            raise LeaseLost(f"{url} was written by another maker.")

    def stop(self) -> None:
        """Stop renewing and give the lease back."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        self._stopped.set()
        # The generation to delete is that of the last renewal.
        self._thread.join()
        if not self.lost:
            try:
                # With the generation, so that the lease of whoever has taken over is not deleted.
                self._blob.delete(if_generation_match=self._generation)
            except (NotFound, PreconditionFailed):
                self.lost = True

    def _keep_renewing(self) -> None:
        # So three renewals may fail before others take over.
        while not self._stopped.wait(LIFETIME_SECONDS / 4):
            try:
                with self._lock:
                    self._renew(self._content)
            except Exception:
                # Storage may be out of reach for a while: the lease holds for its lifetime.
                if time.monotonic() - self._renewed < LIFETIME_SECONDS:
                    continue
                self.lost = True
            if self.lost:
                return

    def _renew(self, content: bytes) -> None:
        generation = files.write_generation(self._blob, content, self._generation)
        if generation is None:
            # The answer to a write that was made may be lost, and the client's own second try is
            # refused then: what is there is this holder's.
            stored_content, current = files.read_generation(self._blob)
            generation = current if stored_content == content else None
        if generation is None:
            self.lost = True
        else:
            self._generation, self._renewed = generation, time.monotonic()
