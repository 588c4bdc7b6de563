"""A lease kept as an object in Cloud Storage, for makers on different machines.

The object is made, renewed and removed with generation preconditions, so at any time one holder at
most succeeds. A waiting maker takes over once the object has not changed for longer than its
lifetime, which it measures on its own clock: no two machines' clocks are compared. Where it can see
that the holder's process has ended, on the same machine, it need not wait so long.

What the holder commits passes through the lease object: it becomes the object's content, and
storage copies exactly that generation to where it belongs. A holder that slept past its lease has
no generation that storage would take.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from artifacts.errors import LeaseLost
from artifacts.leases.holder import describe_holder, is_gone
from artifacts.storage import conditional

if TYPE_CHECKING:
    from google.cloud.storage import Blob

LIFETIME_SECONDS = 60.0
POLL_SECONDS = 1.0


@contextmanager
def object_lease(
    url: str,
    on_wait: Callable[[str], None] | None = None,
    lifetime_seconds: float | None = None,
    poll_seconds: float = POLL_SECONDS,
) -> Iterator["ObjectLease"]:
    """Hold the lease at `gs://bucket/name` while the block runs, renewing it all the time.

    Args:
        url: the lease object.
        on_wait: called once with the holder's description if the lease is taken.
        lifetime_seconds: how long a holder that died keeps others waiting; a minute by default.
        poll_seconds: time between a waiting maker's looks.

    Raises:
        LeaseLost: the lease was lost during the block, because this machine was asleep or cut off
            from storage for longer than the lifetime.
    """
    lifetime = LIFETIME_SECONDS if lifetime_seconds is None else lifetime_seconds
    blob = conditional.blob_of(url)
    generation = _acquire(blob, lifetime, poll_seconds, on_wait)
    lease = ObjectLease(url, blob, generation, lifetime)
    lease.start()
    try:
        yield lease
    finally:
        lease.stop()
    if lease.lost:
        raise LeaseLost(f"The lease {url} was lost: another maker may have taken over.")


def object_is_held(url: str) -> bool:
    """Whether there is a lease object, unless its holder has ended for certain."""
    content, generation = conditional.read(conditional.blob_of(url))
    return generation != conditional.ABSENT and not is_gone((content or b"").decode())


def _acquire(
    blob: "Blob",
    lifetime: float,
    poll_seconds: float,
    on_wait: Callable[[str], None] | None,
) -> int:
    seen, since = conditional.ABSENT, time.monotonic()
    told = False
    while True:
        content, current = conditional.read(blob)
        holder = (content or b"").decode(errors="replace")
        if current != seen:
            seen, since = current, time.monotonic()
        is_free = current == conditional.ABSENT or time.monotonic() - since > lifetime
        if is_free or is_gone(holder):
            taken = conditional.write(blob, describe_holder().encode(), current)
            if taken is not None:
                return taken
            continue
        if on_wait and not told:
            on_wait(holder)
        told = True
        time.sleep(poll_seconds)


class ObjectLease:
    """A lease that is held, and renewed until stopped."""

    def __init__(self, url: str, blob: "Blob", generation: int, lifetime: float) -> None:
        self.lost = False
        self._url = url
        self._blob = blob
        self._generation = generation
        self._lifetime = lifetime
        self._renewed = time.monotonic()
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep_renewing, daemon=True)

    def start(self) -> None:
        """Begin to renew."""
        self._thread.start()

    def check(self) -> None:
        """Raise LeaseLost where the lease is lost, or was not renewed for its lifetime."""
        if self.lost or time.monotonic() - self._renewed > self._lifetime:
            self.lost = True
            raise LeaseLost(f"The lease {self._url} was lost: another maker may have taken over.")

    def commit(self, url: str, content: bytes) -> None:
        """Write an object that is not there yet, if this lease still holds, in one step.

        Raises:
            LeaseLost: another has taken over, or has written the object.
        """
        target = conditional.blob_of(url)
        with self._lock:
            self._renew(content)
            self.check()
            if conditional.copy_new(self._blob, self._generation, target):
                return
        # An answer that was lost on its way is asked for again, and then finds the own copy.
        if conditional.read(target)[0] != content:
            raise LeaseLost(f"{url} was written by another maker.")

    def stop(self) -> None:
        """Stop renewing and give the lease back."""
        from google.api_core.exceptions import NotFound, PreconditionFailed

        self._stopped.set()
        self._thread.join()
        if not self.lost:
            try:
                self._blob.delete(if_generation_match=self._generation)
            except (NotFound, PreconditionFailed):
                self.lost = True

    def _keep_renewing(self) -> None:
        while not self._stopped.wait(self._lifetime / 4):
            try:
                with self._lock:
                    self._renew(describe_holder().encode())
            except Exception:
                # Unreachable for now: the lease holds until its lifetime is over.
                if time.monotonic() - self._renewed < self._lifetime:
                    continue
                self.lost = True
            if self.lost:
                return

    def _renew(self, content: bytes) -> None:
        generation = conditional.write(self._blob, content, self._generation)
        if generation is None:
            self.lost = True
        else:
            self._generation, self._renewed = generation, time.monotonic()
