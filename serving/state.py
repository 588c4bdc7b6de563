"""The endpoint's state folder: what is wanted, and what is.

`desired.json` is written by whoever wants a version served. The API server alone writes
`status.json` and `serving.json` (what took all traffic last). Each is replaced whole, so that a
reader never sees half of one, and an API server finds what was wanted and what was good when the
one before it was killed.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from artifacts.leases import local_lease, process_started
from artifacts.storage import files
from artifacts.storage.files import make_private
from serving.comparison import EngineComparison, JudgedDocument
from serving.settings import SAVED, EndpointSettings, bearer_token

RESTART_SECONDS = (0.0, 1.0, 5.0, 15.0)
"""Pauses before the first, second … restart; the last one repeats."""
STEADY_SECONDS = 60.0
"""Of life, after which earlier deaths no longer count."""
Phase = Literal["starting", "serving", "rolling_out", "failed", "stopped"]
State = TypeVar("State", bound=BaseModel)


class OfVersion(BaseModel):
    """Something that is about one version."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    version: str
    fingerprint: str

    @property
    def headers(self) -> dict[str, str]:
        """What every answer of this version says."""
        return {"X-Model-Version": self.version, "X-Model-Fingerprint": self.fingerprint}

    def is_of(self, other: "OfVersion") -> bool:
        """Whether another is about the same version."""
        return (self.version, self.fingerprint) == (other.version, other.fingerprint)


class Desired(OfVersion):
    """Which model is to be served, and how."""

    model_config = ConfigDict(frozen=True)

    model_folder: Annotated[Path, AfterValidator(Path.absolute)]
    name: str = "default"
    """Of the model, whatever its version: what clients ask for."""
    settings: EndpointSettings
    conversions: Path | None = None
    """Where converted models are cached; absent, beside the state."""
    judged: list[JudgedDocument] = []
    """Documents on which its engine has to say what the evaluation found; a version that does not
    gets no traffic."""

    def model(self, asked: str | None) -> str:
        """The name that an answer gives: the one that was asked for, the pipeline's where none was.

        Where a version was asked for by its number, it is this version's own number: during a
        rollout another version than that may answer.
        """
        if asked in (None, "default"):
            return self.name
        return self.version if asked.isdecimal() else asked

    @property
    def engine(self) -> tuple[object, ...]:
        """What an engine is started with; one that was started with the same serves this, too."""
        settings = self.settings
        what = settings.engine, settings.weights, settings.threads, settings.cache_tokens
        return (self.version, self.fingerprint, *what)


class RouteStatus(OfVersion):
    """One version's engine."""

    share: float
    """Of the traffic, 0 to 1."""
    engine_pid: int | None
    ready: bool
    restarts: int
    engine: str = ""
    """Which one computes, and why that one."""
    comparison: EngineComparison | None = None
    """With the evaluation; None where nothing was judged."""


class RolloutOutcome(OfVersion):
    """How the newest change of version ended."""

    succeeded: bool
    reason: str
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))


@cache
def code_hash() -> str:
    """A hash of this package's sources, as they were when this process first asked: an upgrade
    replaces them under a process that goes on with the old ones."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


class Status(BaseModel):
    """What the endpoint is doing."""

    model_config = ConfigDict(extra="forbid")

    pid: int
    """Of the supervisor, which is the endpoint as long as it lives."""
    process_started: str | None
    """Of the same (`artifacts.leases`): a pid alone may be somebody else's by now."""
    folder: Path | None = None
    """Its state folder, so that a copied status is not taken for that of the copy's own
    endpoint."""
    api_server_pid: int
    host: str
    port: int
    settings: EndpointSettings
    """By which it works now."""
    code: str = ""
    """What it runs by (`code_hash`)."""
    phase: Phase
    has_served: bool = False
    """Whether a version has taken all traffic since it was started, before a crash or after it."""
    routes: list[RouteStatus] = []
    outcome: RolloutOutcome | None = None

    @property
    def url(self) -> str:
        """Where to send requests."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def client_options(self) -> dict[str, Any]:
        """Of an httpx client that asks it; raises UserError where its token is not set here."""
        token = bearer_token(self.settings)
        return {
            "base_url": self.url,
            "headers": {"Authorization": f"Bearer {token}"} if token else {},
            # By no proxy, which would be told the token.
            "trust_env": False,
        }

    @property
    def alive(self) -> bool:
        """Whether the endpoint that this is about still runs."""
        started = process_started(self.pid)
        return started is not None and started == self.process_started


class StateFile(Generic[State]):
    """One of the files: replaced whole."""

    def __init__(self, path: Path, kind: type[State], outlives_machine: bool = True) -> None:
        """What need not be there after a loss of power is not flushed: a disk that many write to
        takes seconds for that, in which its writer does nothing else."""
        self.path, self._kind, self._sync = path, kind, outlives_machine

    def read(self) -> State | None:
        """What it says, or None where it never said anything that this release can use."""
        try:
            # An endpoint that still runs may be of a release that told more, and had more settings.
            return self._kind.model_validate_json(
                self.path.read_bytes(), extra="ignore", context=SAVED
            )
        except (FileNotFoundError, ValidationError):
            return None

    def written(self) -> tuple[int, int] | None:
        """What tells one writing of the file from the next, though both say the same; None where
        it is not there."""
        with suppress(FileNotFoundError):
            # By the inode as well, as two writings may fall into one tick of the file system's
            # clock.
            status = self.path.stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def write(self, content: State) -> None:
        """Raises OSError or UserError where it cannot be written."""
        make_private(self.path.parent)
        files.write(self.path, content.model_dump_json(indent=2).encode(), self._sync)


class StateFolder:
    """The files, and the log beside them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_path = folder / "endpoint.log"
        self.desired = StateFile(folder / "desired.json", Desired)
        self.good = StateFile(folder / "serving.json", Desired)
        """What took all traffic last."""
        self.status = StateFile(folder / "status.json", Status, outlives_machine=False)
        """Of processes, which end with the machine."""
        self.stopped_path = folder / "stopped"
        """There from when somebody has the endpoint stopped until it is started again: a machine
        that goes down ends it, too."""

    @property
    def running(self) -> Status | None:
        """What the endpoint is doing, or None where none runs."""
        status = self.status.read()
        if status is None or not status.alive:
            return None
        folder = status.folder
        is_copy = folder and os.path.exists(folder) and not os.path.samefile(folder, self.folder)
        return None if is_copy else status


def own_key(path: Path, make: Callable[[], bytes]) -> bytes:
    """The key in a file that its owner alone may read, made on first use."""
    key = files.find(path) or b""
    # Under a lock, and not only by whoever makes the file: it is empty until it is written, and
    # stays so on a full disk, and an empty key is one that everybody knows.
    if not key.strip():
        # One that exists may be a folder of yours that others read, too.
        if not path.parent.exists():
            make_private(path.parent)
        lock = path.with_name(f"{path.name}.lock")
        # As private as all that is kept beside it.
        open(lock, "ab", opener=open_private).close()
        with local_lease(lock):
            # Somebody else may have made it while this waited for the lock.
            key = files.find(path) or b""
            if not key.strip():
                key = make()
                # An empty file is removed first: the mode of `open_private` applies to new files
                # alone.
                path.unlink(missing_ok=True)
                with open(path, "xb", opener=open_private) as file:
                    file.write(key)
    return key


def open_private(path: str, flags: int) -> int:
    """An `opener` that makes files which their owner alone may read."""
    return os.open(path, flags, 0o600)


def restart_pause(deaths: int) -> float:
    """Seconds until what has died that often before is started again."""
    return RESTART_SECONDS[min(deaths, len(RESTART_SECONDS) - 1)]
