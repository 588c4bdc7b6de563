"""What services of jobs have in common, and those that make machines: a bill, deletions."""

import itertools
import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import grpc
from google.protobuf import empty_pb2, timestamp_pb2

from tests.stand_ins.faults import RpcFailed, not_found
from tests.stand_ins.grpc_server import Operations
from tests.stand_ins.mount import Mount
from tests.stand_ins.processes import LocalImage

POLL_SECONDS = 0.05
CLAUSE = re.compile(r'labels\.(?P<key>[\w-]+)\s*=\s*"?(?P<value>[\w-]+)"?')
"""The small part of Google's list filters that look-ups of labels need."""


def now() -> timestamp_pb2.Timestamp:
    moment = timestamp_pb2.Timestamp()
    moment.GetCurrentTime()
    return moment


def matches_labels(expression: str, labels: Mapping[str, str]) -> bool:
    """Whether labels satisfy `labels.a="b" AND labels.c="d"`; an empty expression is satisfied."""
    return all(
        labels.get(clause["key"]) == clause["value"] for clause in CLAUSE.finditer(expression)
    )


class Made(Protocol):
    """A job and what it has."""

    job: Any


MadeJob = TypeVar("MadeJob", bound=Made)


class JobService(ABC, Generic[MadeJob]):
    """The jobs of a service."""

    def __init__(
        self,
        folder: Path,
        images: dict[str, LocalImage],
        environment: Mapping[str, str],
        mount: Mount,
        operations: Operations,
    ) -> None:
        self._folder, self._images, self._environment = folder, images, environment
        self._mount, self._operations = mount, operations
        self._made: dict[str, MadeJob] = {}
        self._numbers = itertools.count(1000)
        """One never comes again: what a job printed lies under it."""
        self._lock = threading.RLock()
        self._clear()

    def _clear(self) -> None:
        self.hold_pending = False
        """Leave new jobs without machines."""

    def reset(self) -> None:
        """Forget all jobs, ending what they have."""
        self.stop()
        with self._lock:
            self._made.clear()
            self._clear()

    def stop(self) -> None:
        """End what every job has."""
        for made in list(self._made.values()):
            self._take_down(made)

    def jobs(self) -> list[Any]:
        """All jobs that were not deleted, oldest first."""
        return [made.job for made in self._made.values()]

    @abstractmethod
    def billing(self) -> Sequence[object]:
        """What costs money now."""

    @abstractmethod
    def _take_down(self, made: MadeJob) -> None:
        """End a job's processes and its machines, from which on they cost nothing."""

    def _find(self, name: str) -> MadeJob:
        with self._lock:
            if name not in self._made:
                raise not_found(name)
            return self._made[name]


@dataclass
class MadeMachine:
    """A machine, which costs money from its making to its deletion."""

    job: str
    since: float
    until: float | None = None


class MachineService(JobService[MadeJob]):
    """One that makes machines for each job, and its bill."""

    def _clear(self) -> None:
        super()._clear()
        self.bill: list[MadeMachine] = []
        """Every machine that was made."""
        self.over_quota = False
        """Make no machine of new jobs, since the quota is used up."""
        self.refused_deletions = 0
        """How many of the next deletions fail, after which a job's machines go on."""
        self.deletion_seconds = 0.0
        """How long a deletion takes, while the machines bill."""

    def billing(self) -> list[MadeMachine]:
        return [machine for machine in self.bill if machine.until is None]

    def _delete(self, name: str, mark: Callable[[], object]) -> Any:
        """The operation that deletes a job, of which `mark` says at first that it is going."""
        made = self._find(name)

        def delete() -> empty_pb2.Empty:
            with self._lock:
                refused = self.refused_deletions > 0
                self.refused_deletions -= refused
            if refused:
                raise RpcFailed(grpc.StatusCode.UNAVAILABLE, "The service is unavailable.")
            mark()
            time.sleep(self.deletion_seconds)
            self._take_down(made)
            with self._lock:
                self._made.pop(name, None)
            return empty_pb2.Empty()

        return self._operations.run(name.rsplit("/", 2)[0], delete)
