"""A lease kept as an object in Cloud Storage, for makers on different machines.

The object is made, renewed and removed with generation preconditions, so at any time one holder at
most succeeds. A waiting maker takes over once the object has not changed for longer than its
lifetime, which it measures on its own clock: no two machines' clocks are compared. Where it can see
that the holder's process has ended, on the same machine, it need not wait so long.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from artifacts.errors import UserError
from artifacts.holder import describe_holder, is_gone

if TYPE_CHECKING:
    from google.cloud.storage import Blob

LIFETIME_SECONDS = 60.0
POLL_SECONDS = 1.0
NEW = 0
"""The generation of an object that is not there."""


@contextmanager
def object_lease(
    url: str,
    on_wait: Callable[[str], None] | None = None,
    lifetime_seconds: float = LIFETIME_SECONDS,
    poll_seconds: float = POLL_SECONDS,
) -> Iterator[None]:
    """Hold the lease at `gs://bucket/name` while the block runs, renewing it all the time.

    Args:
        url: the lease object.
        on_wait: called once with the holder's description if the lease is taken.
        lifetime_seconds: how long a holder that died keeps others waiting.
        poll_seconds: time between a waiting maker's looks.

    Raises:
        UserError: the lease was lost during the block, because this machine was cut off from
            storage for longer than the lifetime. What the block wrote must not be committed.
    """
    blob = _blob(url)
    generation = _acquire(blob, lifetime_seconds, poll_seconds, on_wait)
    holder = _Holder(blob, generation, lifetime_seconds)
    holder.start()
    try:
        yield
    finally:
        holder.stop()
    if holder.lost:
        raise UserError(
            f"The lease {url} was lost: another maker may have taken over while this machine could "
            "not reach storage. Ask again; what exists by then is used."
        )


def _blob(url: str) -> "Blob":
    from google.cloud.storage import Client

    bucket, _, name = url.removeprefix("gs://").partition("/")
    return Client().bucket(bucket).blob(name)


def _acquire(
    blob: "Blob",
    lifetime: float,
    poll_seconds: float,
    on_wait: Callable[[str], None] | None,
) -> int:
    from google.api_core.exceptions import NotFound, PreconditionFailed

    seen, since, holder = NEW, time.monotonic(), ""
    told = False
    while True:
        try:
            blob.reload()
            current = int(blob.generation or NEW)
            if current not in (NEW, seen):
                holder = blob.download_as_text(if_generation_match=current)
        except (NotFound, PreconditionFailed):
            current = NEW
        if current != seen:
            seen, since = current, time.monotonic()
        if current == NEW or time.monotonic() - since > lifetime or is_gone(holder):
            taken = _write(blob, current)
            if taken is not None:
                return taken
            continue
        if on_wait and not told:
            on_wait(holder)
        told = True
        time.sleep(poll_seconds)


def _write(blob: "Blob", generation: int) -> int | None:
    """Write the lease over a known generation: the new one, or None where another was faster."""
    from google.api_core.exceptions import NotFound, PreconditionFailed

    try:
        blob.upload_from_string(describe_holder(), if_generation_match=generation)
    except (PreconditionFailed, NotFound):
        return None
    return int(blob.generation or NEW)


class _Holder:
    """Renews the lease until stopped."""

    def __init__(self, blob: "Blob", generation: int, lifetime: float) -> None:
        self.lost = False
        self._blob = blob
        self._generation = generation
        self._lifetime = lifetime
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        from google.api_core.exceptions import NotFound, PreconditionFailed

        self._stopped.set()
        self._thread.join()
        if not self.lost:
            try:
                self._blob.delete(if_generation_match=self._generation)
            except (NotFound, PreconditionFailed):
                self.lost = True

    def _renew(self) -> None:
        renewed = time.monotonic()
        while not self._stopped.wait(self._lifetime / 4):
            try:
                generation = _write(self._blob, self._generation)
            except Exception:
                # Unreachable for now: the lease holds until its lifetime is over.
                if time.monotonic() - renewed < self._lifetime:
                    continue
                generation = None
            if generation is None:
                self.lost = True
                return
            self._generation, renewed = generation, time.monotonic()
