"""What runs and what waits, as Dagster's history has it, and who may read that history."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.errors import UserError
from artifacts.settings import read_yaml
from artifacts.storage.files import make_private

if TYPE_CHECKING:
    from dagster import DagsterInstance

PROJECT_FOLDER = ".llm_assets"
"""What a project's commands write, beside its store."""
LOCAL = ("local_artifact_storage", "compute_logs")
"""Sections of dagster.yaml that may name a folder."""
UNFINISHED = ("QUEUED", "STARTING", "STARTED")


@dataclass(frozen=True)
class UnfinishedRun:
    """A run that waits or is under way."""

    run_id: str
    status: str

    def __str__(self) -> str:
        return f"run {self.run_id[:8]} ({self.status.lower()})"


@dataclass(frozen=True)
class IdleTick:
    """The last look of a sensor or schedule, where it launched nothing and says why."""

    name: str
    at: datetime
    failed: bool
    reason: str

    def __str__(self) -> str:
        outcome = "failed" if self.failed else "waits"
        return f"{self.name} {outcome} ({self.at:%Y-%m-%d %H:%M} UTC): {self.reason}"


@dataclass(frozen=True)
class Activity:
    """What the history knows of now."""

    runs: Sequence[UnfinishedRun] = ()
    ticks: Sequence[IdleTick] = ()


def make_history_private() -> None:
    """Close the folders that dagster.yaml names to other users of this machine.

    Their databases and logs hold extracts of documents, and Dagster itself has them readable.
    """
    home = Path(os.environ.get("DAGSTER_HOME") or ".")
    if not (home / "dagster.yaml").exists():
        return
    settings: Any = read_yaml(home / "dagster.yaml") or {}
    storage = (settings.get("storage") or {}).get("sqlite") or {}
    places = [(settings.get(name) or {}).get("config", {}).get("base_dir") for name in LOCAL]
    for place in {PROJECT_FOLDER, storage.get("base_dir"), *places}:
        # Where it cannot be made, Dagster says so, if it needs it.
        with suppress(OSError):
            if isinstance(place, str):
                make_private(Path(place))


def use_this_folders_history() -> None:
    """Have Dagster read dagster.yaml of this folder; raises UserError where it is no project."""
    if not Path("dagster.yaml").exists():
        raise UserError(
            "There is no dagster.yaml here. Run this in the project's folder, or make this folder "
            "one with: llm-assets init FOLDER_OF_TEXT"
        )
    os.environ.setdefault("DAGSTER_HOME", os.getcwd())
    make_history_private()


def read_activity() -> Activity:
    """What runs and waits by the history of this folder's project; nothing outside of one."""
    if not (os.environ.get("DAGSTER_HOME") or Path("dagster.yaml").exists()):
        return Activity()
    from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

    use_this_folders_history()
    chosen = RunsFilter(statuses=[DagsterRunStatus(status) for status in UNFINISHED])
    with DagsterInstance.get() as instance:
        runs = [UnfinishedRun(run.run_id, run.status.value) for run in instance.get_runs(chosen)]
        return Activity(runs, [tick for tick in _idle_ticks(instance) if tick.reason])


def _idle_ticks(instance: "DagsterInstance") -> Iterator[IdleTick]:
    for state in instance.all_instigator_state():
        for tick in instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=1):
            if tick.status.value in ("SKIPPED", "FAILURE"):
                error = tick.error and (tick.error.cause or tick.error)
                reason = tick.skip_reason or (error.message if error else "")
                at = datetime.fromtimestamp(tick.timestamp, UTC)
                yield IdleTick(state.instigator_name, at, error is not None, reason.strip())
