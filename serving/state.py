"""The endpoint's state folder: what is wanted, and what is.

`desired.json` is written by whoever wants a version served. The API server alone writes
`status.json` and `serving.json` (what took all traffic last). Each is replaced whole, so that a
reader never sees half of one, and an API server finds what was wanted and what was good when the
one before it was killed.
"""

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from artifacts.leases.holder import process_started
from artifacts.storage import files
from serving.comparison import Comparison, JudgedDocument
from serving.settings import EndpointSettings

STATUS_NAME = "status.json"
Phase = Literal["starting", "serving", "rolling_out", "failed", "stopped"]
OF_ENGINES = {"engine", "weights", "threads", "cache_tokens"}
"""Settings that an engine is started with."""
State = TypeVar("State", bound=BaseModel)


class OfVersion(BaseModel):
    """Something that is about one version."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    version: str
    fingerprint: str

    def is_of(self, other: "OfVersion") -> bool:
        """Whether another is about the same version."""
        return (self.version, self.fingerprint) == (other.version, other.fingerprint)


class Desired(OfVersion):
    """Which model is to be served, and how."""

    model_config = ConfigDict(frozen=True)

    model_folder: Path
    name: str = "default"
    """Of the model, whatever its version: what clients ask for."""
    settings: EndpointSettings
    conversions: Path | None = None
    """Where converted models are cached; absent, beside the state."""
    judged: list[JudgedDocument] = []
    """Documents on which its engine has to say what the evaluation found."""

    def fits_engine_of(self, other: "Desired") -> bool:
        """Whether an engine that was started for another serves this too."""
        mine, its = (one.settings.model_dump(include=OF_ENGINES) for one in (self, other))
        return self.is_of(other) and mine == its


class RouteStatus(OfVersion):
    """One version's engine."""

    share: float
    """Of the traffic, 0 to 1."""
    engine_pid: int | None
    engine_port: int | None
    """On loopback, for the API server alone."""
    ready: bool
    restarts: int
    engine: str = ""
    """Which one computes, and why that one."""
    comparison: Comparison | None = None
    """With the evaluation; None where nothing was judged."""


class Outcome(OfVersion):
    """How the newest change of version ended."""

    succeeded: bool
    reason: str
    at: datetime = Field(default_factory=lambda: datetime.now(UTC))


class Status(BaseModel):
    """What the endpoint is doing."""

    model_config = ConfigDict(extra="forbid")

    pid: int
    """Of the supervisor, which is the endpoint as long as it lives."""
    process_started: str | None
    """Of the same (`artifacts.leases.holder`): a pid alone may be somebody else's by now."""
    api_server_pid: int
    host: str
    port: int
    settings: EndpointSettings
    """By which it works now."""
    phase: Phase
    routes: list[RouteStatus] = []
    outcome: Outcome | None = None
    updated_at: datetime = Field(default_factory=lambda: datetime.now(UTC))

    @property
    def url(self) -> str:
        """Where to send requests."""
        return f"http://{self.host}:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether the endpoint that this is about still runs."""
        started = process_started(self.pid)
        return started is not None and started == self.process_started


class StateFolder:
    """Reads and writes the three files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.status_path = folder / STATUS_NAME
        self.log_path = folder / "endpoint.log"

    def read_desired(self) -> Desired | None:
        """What is wanted, or None where nothing was ever asked for."""
        return self._read("desired.json", Desired)

    def write_desired(self, desired: Desired) -> None:
        self._write("desired.json", desired)

    def read_good(self) -> Desired | None:
        """What took all traffic last, or None where nothing ever did."""
        return self._read("serving.json", Desired)

    def write_good(self, desired: Desired) -> None:
        """Note that a version has taken all traffic."""
        self._write("serving.json", desired)

    def read_status(self) -> Status | None:
        """What the API server last said, or None where there was never one."""
        return self._read(STATUS_NAME, Status)

    def write_status(self, status: Status) -> None:
        self._write(STATUS_NAME, status)

    def _read(self, name: str, kind: type[State]) -> State | None:
        try:
            return kind.model_validate_json((self.folder / name).read_bytes())
        except (FileNotFoundError, ValidationError):
            # A file of an older release says nothing that this one can use.
            return None

    def _write(self, name: str, content: BaseModel) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        os.chmod(self.folder, 0o700)
        text = content.model_dump_json(indent=2).encode()
        files.write(self.folder / name, text)
