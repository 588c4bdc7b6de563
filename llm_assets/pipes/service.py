"""A job of a remote service: its names and labels, what a client asks, how long it waits."""

import hashlib
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar
from urllib.parse import quote

from dagster import AssetExecutionContext, OpExecutionContext, PipesSession

from llm_assets.pipes.failures import JobService, RetryPolicy

# Most methods of the generated clients have no timeout of their own, and a run waits for each call
# before it lets a signal through.
CALL_SECONDS = 60.0
LONGEST_LABEL = 63
LONGEST_KEY = 56
"""Leaves room within Google's 63 characters for `-` and the number of an attempt."""


def external_key(name: str, fingerprint: str) -> str:
    """The deterministic name of a job: a readable part and the fingerprint, at most 56 characters.

    Lower-case letters, digits and hyphens, beginning with a letter and ending without a hyphen, as
    Dataproc asks of a batch id. A fingerprint that is long or has other characters is hashed, so
    two fingerprints never share a key.
    """
    if not re.fullmatch(r"[a-z0-9]{1,40}", fingerprint):
        fingerprint = hashlib.sha256(fingerprint.encode()).hexdigest()[:20]
    # Only the readable part is cut: the fingerprint alone keeps two jobs of one asset apart.
    room = LONGEST_KEY - len(fingerprint) - 1
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not readable or not readable[0].isalpha():
        readable = f"job-{readable}"
    return f"{readable[:room].strip('-')}-{fingerprint}"


def as_labels(values: Mapping[str, str]) -> dict[str, str]:
    """Google labels: lower-case letters, digits, `_` and `-`, keys beginning with a letter."""
    labels = {}
    for key, value in values.items():
        clean = re.sub(r"[^a-z0-9_-]", "-", key.lower()).strip("-_")
        clean = clean if clean[:1].isalpha() else f"x-{clean}"
        labels[clean[:LONGEST_LABEL]] = re.sub(r"[^a-z0-9_-]", "-", str(value).lower())[
            :LONGEST_LABEL
        ].strip("-_")
    return labels


def as_dns_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The same by RFC 1035, as Dataproc asks: no `_`, and a value begins with a letter, if any."""
    return {_as_dns_label(key): value and _as_dns_label(value) for key, value in labels.items()}


def _as_dns_label(text: str) -> str:
    clean = text.replace("_", "-")
    return (clean if clean[:1].isalpha() else f"x-{clean}")[:LONGEST_LABEL].strip("-")


KEY_LABEL = "pipeskey"
"""What the job does; the same for all its attempts. One word: of separators, Dataproc allows only
hyphens in a label, which a filter might take for its own."""
# Dagster's `dagster/run-id`, after `as_labels` has replaced the slash.
RUN_LABEL = "dagster-run-id"
MESSAGES_LABEL = "pipesmessages"
"""Says where the attempt writes its messages."""

INTERRUPTED_STATUS = 75
"""Exit status of a program that was told to end, and has saved its state."""

Context = OpExecutionContext | AssetExecutionContext


def parse_parent(parent: str) -> tuple[str, str]:
    """`(project, region)` of `projects/<project>/locations/<region>`; raises ValueError."""
    parts = parent.split("/")
    if len(parts) != 4 or parts[0] != "projects" or parts[2] != "locations" or not all(parts):
        raise ValueError(
            f"parent has to look like projects/my-project/locations/us-central1, not {parent!r}"
        )
    return parts[1], parts[3]


def asset_names(context: Context) -> list[str]:
    """The assets that a run is making now; empty for an op that belongs to no asset."""
    keys = context.selected_asset_keys if context.has_assets_def else ()
    return sorted("-".join(key.path) for key in keys)


def key_of(context: Context, fingerprint: str | None) -> str:
    """The job's key, named after its assets or its op; without a fingerprint it belongs to this run
    and step alone."""
    name = "-".join(asset_names(context)) or context.op_handle.name
    if fingerprint is None:
        fingerprint = f"{context.run_id}/{name}/{context.retry_number}"
    return external_key(name, fingerprint)


class Phase(Enum):
    """The states of all services, as far as a client cares."""

    WAITING = "waiting for machines"
    RUNNING = "running"
    CANCELLING = "being cancelled"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)

    @property
    def adoptable(self) -> bool:
        """Whether a run may follow such a job instead of submitting its own."""
        return self in (Phase.WAITING, Phase.RUNNING)


@dataclass(frozen=True)
class RemoteJob:
    """A job as its service describes it now."""

    name: str
    """The full resource name."""
    phase: Phase
    detail: str
    """The service's own words on its state."""
    labels: Mapping[str, str]
    created: float = 0.0
    """Seconds since the epoch."""
    exit_status: int | None = None
    """Exit status of the program that failed the job, if the service reports it."""
    lost_machines: bool = False
    """Whether it failed because its machines were taken away, or because there were none."""
    started: float = 0.0
    """Seconds since the epoch when it had its machines; 0 before."""
    ended: float = 0.0
    """Seconds since the epoch when they were gone; 0 before."""
    machines: int = 0
    """How many it has or requests; 0 if the service decides."""
    machine_type: str = ""
    is_cheaper: bool = False
    """Whether they are spot or flex-start machines."""
    uid: str = ""
    """The service's unique id, where a later job may get the same name."""
    billed_hours: float = 0.0
    """Hours as counted by the service, in its own unit; 0 if it does not count."""
    units: float = 0.0
    """Number of these units at the moment; 0 if not reported."""
    holds_machines: bool = False
    """Whether it has ended, but still has machines that cost money."""

    @property
    def interrupted(self) -> bool:
        """Ended in a way that says: start me again, from the last checkpoint."""
        return self.lost_machines or self.exit_status == INTERRUPTED_STATUS

    @property
    def in_words(self) -> str:
        """Its phase, and why it waits where the service says so."""
        reason = f", since {self.detail}" if self.phase is Phase.WAITING and self.detail else ""
        return self.phase.value + reason


def seconds(moment: Any) -> float:
    """Of a moment as a generated client gives it, since the epoch; 0 where it is not set."""
    return float(moment.timestamp()) if moment else 0.0


def delete(ask: Callable[[], Any], seconds: float) -> None:
    """Request a deletion and return once the resource is gone, or was gone before.

    The call returns Google's operation, which may take that many seconds.
    """
    from google.api_core.exceptions import NotFound

    with suppress(NotFound):
        ask().result(timeout=seconds)


class RemoteService(ABC):
    """The jobs of one Google service in one project and region; every method is one call or a few.

    Args:
        client: what `connect` gives.
        parent: `projects/<project>/locations/<region>`; another raises ValueError.
        job: what `create` submits, as the generated client describes it, or its dict.
    """

    kind: ClassVar[JobService]
    generated: ClassVar[tuple[str, str]]
    """The package of its generated client, and the client's class."""
    address: ClassVar[str]
    """Where Google's own service answers, with a place for the region."""
    collection: ClassVar[str]
    """What comes before a job's short name in its resource name."""
    key_filter: ClassVar[str] = ""
    """Filter of its list, with places for label and key: each service has its own grammar. Empty
    where the list takes none."""
    page: ClassVar[str]
    """Path of a job's page in the console, with places for its short name and its region."""
    log_filter: ClassVar[str]
    """Filter of Cloud Logging for what a job's programs print, with a place for its short name."""

    def __init__(self, client: Any, parent: str, job: Any = None) -> None:
        project, region = parse_parent(parent)
        # The advice to wait in Google's queue is of no use to a job that did.
        could_wait = self.kind.flex_start and "FLEX_START" not in str(job)
        self.place = replace(self.kind, project=project, region=region, flex_start=could_wait)
        self._client = client
        self._parent = parent
        self._job = job

    @classmethod
    def connect(cls, region: str, endpoint: str | None = None) -> Any:
        """The service's generated client; `endpoint` takes the place of Google's own address."""
        address = endpoint or cls.address.format(region=region)
        return cls.type_named(cls.generated[1])(client_options={"api_endpoint": address})

    @classmethod
    def type_named(cls, name: str) -> Any:
        """A class of the generated client's package, which is imported when it is needed."""
        return getattr(importlib.import_module(cls.generated[0]), name)

    @classmethod
    def parents(cls, client: Any, parent: str) -> list[str]:
        """Where the jobs of a project and region are made: the region itself, or zones of it."""
        return [parent]

    @abstractmethod
    def list_all(self, request: Mapping[str, str]) -> Iterable[Any]:
        """The service's answer to a `parent` and, where there is one, a `filter`."""

    @abstractmethod
    def describe(self, job: Any) -> RemoteJob:
        """A job of the service's own kind."""

    def find(self, key: str | None = None) -> list[RemoteJob]:
        """All jobs with the key as a label; without one, those of any client of this package."""
        request = {"parent": self._parent}
        if key and self.key_filter:
            request["filter"] = self.key_filter.format(label=KEY_LABEL, key=key)
        # Compared here as well, since not every service filters; before `describe`, which may make
        # calls of its own.
        labeled = [(self.labels_of(job).get(KEY_LABEL), job) for job in self.list_all(request)]
        return [self.describe(job) for its, job in labeled if its and key in (None, its)]

    def labels_of(self, job: Any) -> Mapping[str, str]:
        """The labels of a job of the service's own kind."""
        return dict(job.labels)

    def full_name(self, short: str) -> str:
        """The resource name of a job of this short name."""
        return f"{self._parent}/{self.collection}/{short}"

    @abstractmethod
    def submit(self, short: str, labels: Mapping[str, str], session: PipesSession) -> RemoteJob:
        """One call, or a few, that make the job; AlreadyExists where its name is taken."""

    def get(self, name: str) -> RemoteJob:
        """The job as it is now."""
        from google.api_core.exceptions import NotFound

        try:
            return self.describe(self.look_up(name))
        except NotFound:
            reason = "It was deleted, by another than this run."
            return RemoteJob(name, Phase.CANCELLED, reason, labels={})

    @abstractmethod
    def look_up(self, name: str) -> Any:
        """A job of the service's own kind; raises NotFound where it was deleted."""

    @abstractmethod
    def cancel(self, job: RemoteJob) -> None:
        """Ask the service to end the job."""

    def release(self, job: RemoteJob) -> None:
        """Take down what an ended job still has; most services do so themselves."""
        return

    def links(self, name: str) -> dict[str, str]:
        """`console` and `logs`: where a person sees the job, and its programs' lines."""
        job = name.rsplit("/", 1)[-1]
        query = quote(self.log_filter.format(job=job), safe="")
        pages = {
            "console": self.page.format(region=self.place.region, job=job),
            "logs": f"logs/query;query={query}",
        }
        root, project = "https://console.cloud.google.com", self.place.project
        return {name: f"{root}/{page}?project={project}" for name, page in pages.items()}


@dataclass
class Restarts:
    """Whether an interrupted program is started again.

    Only restarts without progress count against the limit: a training of a week whose machine is
    taken every three hours is restarted 56 times.
    """

    most: int
    """How many may be in vain, one after the other."""
    progress: Callable[[], object]
    """What the program has reached."""
    in_vain: int = field(default=0, init=False)
    total: int = field(default=0, init=False)
    # Before the first restart nothing was in vain, so the progress until then is not needed.
    _reached: object = field(default=None, init=False)

    def allow(self) -> bool:
        """Whether to start it once more, which is counted."""
        reached = self.progress()
        if reached != self._reached:
            self._reached, self.in_vain = reached, 0
        if self.in_vain == self.most:
            return False
        self.in_vain += 1
        self.total += 1
        return True

    def __str__(self) -> str:
        return f"{self.in_vain} of at most {self.most} times without progress"


@dataclass(frozen=True)
class Limits:
    """How long to wait for what."""

    poll_seconds: float = 10.0
    """Longest time between two looks at a job in which nothing happens; the first come sooner."""
    pending_seconds: float = 3600.0
    """How long a job may wait for machines before it is cancelled."""
    reason_seconds: float = 90.0
    """How long to wait for a failed job's reason, which services give some time after its state."""
    drain_seconds: float = 30.0
    """How long to wait for the last messages after a job has ended."""
    restarts: int = 3
    """How often a job is started again, within one run and without progress since, whose machines
    were taken, or whose program exited with status 75 or ended without a word."""
    progress: Callable[[], object] = lambda: None
    """What the job has reached; restarts count from zero whenever it differs."""
    restart_delay_seconds: float = 10.0
    """Wait before the first restart; it doubles with each in vain, up to ten minutes."""
    retries: RetryPolicy = field(default_factory=RetryPolicy)
    objection: Callable[[RemoteJob], str | None] = lambda job: None
    """Asked at each look at a job; a reason that it must not go on has it cancelled."""
