"""What went wrong, in words that say what to ask for, and which errors are retried."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dagster import Failure, MetadataValue

from artifacts.errors import first_line
from artifacts.reasons import reason_of

QUOTA = re.compile(r"(?<![a-z.])quota|insufficient '", re.IGNORECASE)
"""Not within a longer name: an error may also name the right to see quotas, or the address of their
list."""
RATE = re.compile(r"per minute|per second|per day|per user|rate.?limit", re.IGNORECASE)
IMAGE = re.compile(r"pull|image .*not found|manifest unknown|imagepull", re.IGNORECASE)
NO_MACHINES = re.compile(
    r"resources are insufficient|stock-?out|out of stock|not have enough resources", re.IGNORECASE
)
QUOTA_PROJECT = re.compile(r"serviceusage\.services\.use|USER_PROJECT_DENIED")
REGION = re.compile(r"\bregion\b|location id|\blocation\b.*match", re.IGNORECASE)
POLICY = re.compile(r"constraints/[\w.]+")
REVOKED = re.compile(r"invalid_grant|reauth", re.IGNORECASE)
"""What the token server says about a revoked key or an expired login; gRPC wraps it into an error
that reads as if the service were busy."""
CLOCK = re.compile(r"reasonable timeframe|iat and exp", re.IGNORECASE)
"""What the token server says to a machine with a wrong clock."""
DISABLED_API = re.compile(r"has not been used in project|is disabled|SERVICE_DISABLED")


class RemoteJobFailed(Failure):
    """A remote job failed, or could not be started; the description says what to do next."""


@dataclass(frozen=True)
class JobService:
    """Where a job runs, as messages name it."""

    service: str
    """With its new name: `Vertex AI (Gemini Enterprise Agent Platform)`."""
    api: str
    """`dataproc.googleapis.com`."""
    role: str
    """The role that lets the caller start jobs, `roles/dataproc.editor`."""
    project: str = ""
    region: str = ""
    pulls_images: str = "the job's service account"
    """Who fetches the job's container image, and so needs the right to."""
    addresses: str = ""
    """What its machines need of external addresses, where that is worth a sentence."""
    flex_start: bool = False
    """Whether a job could wait in Google's queue for machines, and has not asked to."""


def is_resource_quota(message: str) -> bool:
    """Whether a message is about a quota of machines, not about a rate of calls."""
    return bool(QUOTA.search(message)) and not RATE.search(message)


def explain(message: str, status: int | None, place: JobService) -> str:
    """Advice for an error's message and HTTP status; empty where there is none to give."""
    project, region = place.project, place.region
    # First of all, since the token server says `invalid_grant` of a signature by a wrong clock,
    # too, and the advice for that would be to log in again.
    if CLOCK.search(message):
        return (
            "The clock of this machine is minutes away from Google's, which takes no signature of "
            "another time. Set it, such as by `sudo timedatectl set-ntp true`, and ask again."
        )
    if DISABLED_API.search(message):
        # Where Google names the page that enables it.
        named = re.search(r"([a-z]+\.googleapis\.com)/overview", message)
        api = named[1] if named else place.api
        return f"Enable the API: gcloud services enable {api} --project={project}"
    if is_resource_quota(message):
        return (
            f"The quota of project {project} in {region} is too small for what was asked. Ask for "
            "more of the quota named above at https://console.cloud.google.com/iam-admin/quotas"
            f"?project={project} (filter: {place.api}, {region}), or ask for fewer or other "
            "machines."
        )
    if IMAGE.search(message):
        return (
            "The container image could not be pulled. Build and push it (images/build.sh or your "
            f"own), check its name, and give {place.pulls_images} roles/artifactregistry.reader on "
            "its repository."
        )
    if NO_MACHINES.search(message):
        queue = ", or flex-start, which waits in Google's own queue" if place.flex_start else ""
        return (
            f"{region} had no such machines free. Ask for another machine or accelerator type, or "
            f"another region{queue}."
        )
    if QUOTA_PROJECT.search(message):
        return (
            "Your credentials charge their calls to a project in which you may not: ask for "
            "roles/serviceusage.serviceUsageConsumer on it, or name another with `gcloud auth "
            "application-default set-quota-project`."
        )
    if policy := POLICY.search(message):
        return (
            f"An organization policy forbids this: {policy[0]}. Ask who administers the "
            f"organization's policies for an exception for the project. {place.addresses}"
        ).rstrip()
    # The message is matched first: a status has many causes.
    if status == 403:
        return (
            f"The identity that runs Dagster lacks a right. Ask the owner of project {project} for "
            f"{place.role} on it, and for roles/iam.serviceAccountUser on the job's service "
            "account."
        )
    if status == 401 or REVOKED.search(message):
        return (
            "The credentials were refused. Renew them with `gcloud auth application-default "
            "login`, or check the service account's key in GOOGLE_APPLICATION_CREDENTIALS."
        )
    if status == 400 and REGION.search(message):
        return (
            f"The client talks to {region}. Use one region for client, job, bucket and image, and "
            "set it in one place."
        )
    if status == 404:
        return f"Check the names in the message, and that project {project} and {region} are meant."
    return ""


def refusal(error: Exception, doing: str, place: JobService) -> tuple[str, str]:
    """What Google refused while `doing` something, in its words, and advice if there is any."""
    message, status = getattr(error, "message", None) or str(error), getattr(error, "code", None)
    advice = explain(message, status if isinstance(status, int) else None, place)
    return f"{place.service} refused {doing} ({status or type(error).__name__}): {message}", advice


def failure_of(error: Exception, doing: str, place: JobService) -> RemoteJobFailed:
    """The failure for an error that Google raised while `doing` something."""
    told = refusal(error, doing, place)
    return _failure(told, advice=told[1])


def failure_while_running(error: Exception, page: str) -> RemoteJobFailed:
    """The failure for an error of whatever kind, after which a job with this page goes on."""
    told = error.description if isinstance(error, Failure) else reason_of(error)
    goes_on = (
        "The job goes on and costs money: materialize the asset again and the run follows it, "
        f"or cancel it at {page}"
    )
    description = f"{told or first_line(error)}\n{goes_on}"
    may_retry, links = getattr(error, "allow_retries", True), getattr(error, "metadata", None)
    return RemoteJobFailed(description, links, allow_retries=may_retry)


def failure_of_job(
    text: str, detail: str, links: Mapping[str, str], name: str, place: JobService
) -> RemoteJobFailed:
    """The failure of a job that ended badly, with its `RemoteService.links`."""
    advice = explain(detail, None, place)
    lines = [text, f"Reason given: {detail}" if detail else "", advice]
    lines += [f"Look at {links['console']}", f"What it printed: {links['logs']}"]
    urls = {key: MetadataValue.url(url) for key, url in links.items()}
    return _failure(lines, advice, {"job": name, **urls})


def _failure(
    lines: Sequence[str | None], advice: str, metadata: dict[str, Any] | None = None
) -> RemoteJobFailed:
    # With advice there is something to do first, so a retry alone would fail again.
    description = "\n".join(filter(None, lines))
    return RemoteJobFailed(description, metadata, allow_retries=not advice)


def reported_on_closing(closed: Mapping[str, Any] | None) -> str:
    """What a program said in its closing message, if it ended with an exception."""
    exception = (closed or {}).get("exception")
    if not exception:
        return ""
    lines = (exception.get("message") or "").strip().splitlines() or [""]
    # If the message contains a traceback, its last line is the cause.
    message = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return f"Its program reported {exception.get('name')}: {message}"


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
    """Delays that double while nothing happens."""

    def __init__(self, first: float, longest: float) -> None:
        self._first = self._next = min(first, longest)
        self._longest = longest

    def reset(self) -> None:
        """Something happened: begin with the first delay again."""
        self._next = self._first

    def take(self) -> float:
        """The delay to wait now, in seconds."""
        delay = self._next
        self._next = min(self._longest, 2 * delay)
        return delay


def is_transient(error: Exception) -> bool:
    """Whether the same call may succeed later: 429 for its rate, 5xx, a cut connection."""
    from google.api_core import exceptions
    from google.auth.exceptions import TransportError
    from requests import exceptions as of_requests

    if REVOKED.search(str(error)):
        return False
    if isinstance(error, exceptions.GoogleAPICallError):
        # A quota of machines is refused with the status of too many calls, and stays used up.
        if is_resource_quota(error.message or ""):
            return False
        # Of conflicts, only Aborted may be gone at the next try; AlreadyExists stays.
        if error.code == 409:
            return isinstance(error, exceptions.Aborted)
        # gRPC gives a stream that was cut the status Unknown, and says so in words alone.
        unnamed_stream_fault = isinstance(error, exceptions.Unknown) and "tream" in str(error)
        return error.code in BUSY_STATUSES or unnamed_stream_fault
    connection_errors = (
        ConnectionError,
        TransportError,
        of_requests.ConnectionError,
        of_requests.Timeout,
    )
    return isinstance(error, (*connection_errors, exceptions.RetryError))


def call_with_retries(
    function: Callable[[], Result],
    policy: RetryPolicy,
    report: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Call until it works; raise the last error where it fails for good or the time is up.

    `report` gets one line for each try that failed.
    """
    from google.api_core.exceptions import Unauthenticated

    backoff = Backoff(policy.first_delay_seconds, policy.longest_delay_seconds)
    deadline = time.monotonic() + policy.give_up_after_seconds
    refusals = 0
    while True:
        try:
            return function()
        except Exception as error:
            # Every exception is caught, because transient errors have no class of their own. After
            # an expired or revoked token, the client library fetches a new one.
            refusals += isinstance(error, Unauthenticated)
            may_retry = is_transient(error) or 0 < refusals < CREDENTIAL_ATTEMPTS
            delay = backoff.take()
            if not may_retry or time.monotonic() + delay > deadline:
                raise
            report(f"Google answered: {first_line(error)}. Trying again in {delay:.0f} s")
            sleep(delay)
