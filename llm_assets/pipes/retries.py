"""Calls that are tried again while the service says that it is busy."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from artifacts.errors import first_line
from llm_assets.pipes.failures import REVOKED, is_resource_quota

Result = TypeVar("Result")

BUSY_STATUSES = (429, 500, 502, 503, 504)
CREDENTIAL_ATTEMPTS = 3


@dataclass(frozen=True)
class RetryPolicy:
    """Delays between tries: they double from the first to the longest, until the time is up."""

    first_delay_seconds: float = 1.0
    longest_delay_seconds: float = 60.0
    give_up_after_seconds: float = 900.0


class Backoff:
    """Delays that grow while nothing happens."""

    def __init__(self, first: float, longest: float, factor: float = 2.0) -> None:
        self._first = min(first, longest)
        self._longest = longest
        self._factor = factor
        self._next = self._first

    def reset(self) -> None:
        """Something happened: begin with the first delay again."""
        self._next = self._first

    def take(self) -> float:
        """The delay to wait now, in seconds."""
        delay = self._next
        self._next = min(self._longest, delay * self._factor)
        return delay


def is_transient(error: Exception) -> bool:
    """Whether the same call may succeed later: 429 for its rate, 5xx, a cut connection."""
    from google.api_core import exceptions

    if REVOKED.search(str(error)):
        return False
    if isinstance(error, exceptions.GoogleAPICallError):
        if is_resource_quota(error.message or ""):
            return False
        if error.code == 409:
            return isinstance(error, exceptions.Aborted)
        unnamed_stream_fault = isinstance(error, exceptions.Unknown) and "tream" in str(error)
        return error.code in BUSY_STATUSES or unnamed_stream_fault
    return isinstance(error, ConnectionError | exceptions.RetryError) or _is_transport(error)


def _is_transport(error: Exception) -> bool:
    from google.auth.exceptions import TransportError
    from requests.exceptions import ConnectionError as RequestsConnectionError
    from requests.exceptions import Timeout

    return isinstance(error, TransportError | RequestsConnectionError | Timeout)


def is_refused_credential(error: Exception) -> bool:
    """An expired or revoked token; the client library gets a new one on a later try."""
    from google.api_core import exceptions

    return isinstance(error, exceptions.Unauthenticated)


def call_with_retries(
    function: Callable[[], Result],
    policy: RetryPolicy,
    report: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Call until it works; raise the last error where it fails for good or the time is up.

    `report` gets one line for each try that failed.
    """
    backoff = Backoff(policy.first_delay_seconds, policy.longest_delay_seconds)
    deadline = time.monotonic() + policy.give_up_after_seconds
    refused = 0
    while True:
        try:
            return function()
        except Exception as error:
            # What may go well the next time has no class of its own.
            refused += is_refused_credential(error)
            again = is_transient(error) or 0 < refused < CREDENTIAL_ATTEMPTS
            delay = backoff.take()
            if not again or time.monotonic() + delay > deadline:
                raise
            report(f"Google answered: {first_line(error)}. Trying again in {delay:.0f} s")
            sleep(delay)
