"""What runs, waits and failed, read from Dagster's history without Dagster, which takes 0.7 s.

These tables and columns have not changed for years; a test writes them with the pinned Dagster. A
history in another database is read through Dagster itself.
"""

import json
import os
import re
import shlex
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artifacts.leases import is_gone
from artifacts.reasons import reason_of
from artifacts.settings import read_yaml, value_at
from artifacts.storage.files import make_private
from llm_assets.config import PipelineSettings

if TYPE_CHECKING:
    from dagster import DagsterInstance

PROJECT_FOLDER = ".llm_assets"
"""What a project's commands write, beside its store."""
LOCAL = ("local_artifact_storage", "compute_logs")
"""Sections of dagster.yaml that may name a folder."""
PIPELINE_TAG = "llm_assets/pipeline"
PROCESS_TAG = ".dagster/llm_assets/process"
"""The process of a run that no daemon watches, written like a lease's holder. The UI hides tags
with this prefix."""
TEXT_SENSOR = "source_text_changed"
ENDPOINT_SENSOR = "endpoint_follows"
BASE_MODEL_SENSOR = "base_model_changed"
QUALITY_SENSOR = "serving_quality"
AUTOMATED = (TEXT_SENSOR, ENDPOINT_SENSOR, BASE_MODEL_SENSOR, QUALITY_SENSOR)
"""Sensors that `automation.enabled` switches on and off, unless somebody did so in the UI."""
NOTIFYING = ("failed_runs_are_told", "verdicts_are_told")
"""Sensors that only send messages: of failed runs, and of verdicts."""
RUNNING = ("QUEUED", "STARTING", "STARTED")
RUNS_DATABASE, TICKS_DATABASE = "history/runs.db", "schedules/schedules.db"
_OWN = (
    "FROM runs LEFT JOIN run_tags AS ours ON ours.run_id = runs.run_id AND ours.key = ? LEFT JOIN "
    "run_tags AS process ON process.run_id = runs.run_id AND process.key = ? "
    "WHERE (ours.value IS NULL OR ours.value = ?)"
)
"""Runs of a pipeline, or without a pipeline's tag, with the process that each was started in."""
# The list at the end has a `?` for each of RUNNING.
RUNS_ASKED = (
    f"SELECT runs.run_id, status, process.value {_OWN} AND status IN (?, ?, ?) "
    "ORDER BY runs.id DESC"
)
FAILED_ASKED = f"SELECT COUNT(*) {_OWN} AND status = 'FAILURE' AND update_timestamp > ?"
HEARTBEATS_ASKED = "SELECT MAX(json_extract(body, '$.timestamp')) FROM daemon_heartbeats"
TICKS_ASKED = (
    "SELECT tick_body, instigators.status FROM job_ticks LEFT JOIN instigators USING (selector_id) "
    "WHERE job_ticks.status IN ('SKIPPED', 'FAILURE') AND job_ticks.id IN (SELECT MAX(id) FROM "
    "job_ticks WHERE status != 'STARTED' GROUP BY selector_id) ORDER BY job_ticks.id"
)
"""Only ticks that ended: while the next one is under way, the last one's answer still holds."""


@dataclass(frozen=True)
class Activity:
    """What the history knows of now."""

    runs: Sequence[str] = ()
    """Those that wait or are under way, in words."""
    ticks: Sequence[str] = ()
    """The sensors and schedules whose last look that ended launched nothing, and why."""
    failed: int = 0
    """Runs that failed within the last day."""
    heartbeat: datetime | None = None
    """When the daemon last said that it lives; None where it never did."""
    fault: str = ""
    """Why nothing of this is known, in words."""


def dagster_home(folder: Path) -> Path | None:
    """The folder whose dagster.yaml counts in `folder`: that one, else DAGSTER_HOME's.

    None if neither has one. A project's own comes first, since `llm-assets up` uses it, and what is
    started in a terminal has to wait for the runs that it launches.
    """
    places = (folder, Path(os.environ.get("DAGSTER_HOME") or folder))
    return next((home for home in places if (home / "dagster.yaml").exists()), None)


def other_home(folder: Path) -> str | None:
    """A warning that DAGSTER_HOME names another folder than the one whose dagster.yaml counts; None
    otherwise."""
    value, home = os.environ.get("DAGSTER_HOME"), dagster_home(folder)
    if not value or home is None or home.resolve() == Path(value).resolve():
        return None
    return (
        f"DAGSTER_HOME is {value}, but the history of runs is the one that dagster.yaml in {home} "
        "names, as for `llm-assets up`. For Dagster's own commands to use it too: "
        f"export DAGSTER_HOME={shlex.quote(str(home))}"
    )


def sqlite_folder(home: Path) -> Path | None:
    """Dagster's folder of databases, relative to where its programs run, as dagster.yaml has it.

    None where the history is in another database, or Dagster takes the path from the environment.
    """
    base = value_at(read_yaml(home / "dagster.yaml"), "storage.sqlite.base_dir")
    return Path(base) if isinstance(base, str) else None


def make_history_private() -> None:
    """Close the folders that dagster.yaml names to other users of this machine.

    Their databases and logs hold extracts of documents, and Dagster itself has them readable.
    """
    home = Path(os.environ.get("DAGSTER_HOME") or ".")
    if not (home / "dagster.yaml").exists():
        return
    settings = read_yaml(home / "dagster.yaml")
    places = [value_at(settings, f"{name}.config.base_dir") for name in LOCAL]
    for place in {PROJECT_FOLDER, sqlite_folder(home), *places}:
        # If it cannot be created, Dagster reports that once it needs it.
        with suppress(OSError):
            if isinstance(place, str | Path):
                make_private(Path(place))


def read_activity(folder: Path, settings: PipelineSettings) -> Activity:
    """What of a pipeline runs and waits by the history of a folder's dagster.yaml.

    Empty without one; without runs of other pipelines, as far as their tags tell.
    """
    try:
        return _read_activity(folder, settings)
    except Exception as error:
        # A driver of another database may raise anything.
        reason = reason_of(error)
        if reason is None and not isinstance(error, sqlite3.Error):
            raise
        return Activity(fault=reason or f"The history of runs cannot be read: {error}.")


def is_switched_on(settings: PipelineSettings, name: str, status: str | None) -> bool:
    """Whether a sensor or schedule is the pipeline's and ticks, by its status in Dagster, which
    keeps the status of a sensor that the file has switched off since."""
    base_name = name.rpartition("__")[2]
    if name != settings.dagster_name(base_name) or status == "STOPPED":
        return False
    return settings.automation.enabled or status == "RUNNING" or base_name not in AUTOMATED


def _read_activity(folder: Path, settings: PipelineSettings) -> Activity:
    home = dagster_home(folder)
    if home is None:
        return Activity()
    base = sqlite_folder(home)
    if base is None:
        return _by_dagster(home, settings)
    database, yesterday = folder / base / RUNS_DATABASE, datetime.now(UTC) - timedelta(days=1)
    values = (PIPELINE_TAG, PROCESS_TAG, settings.name)
    runs = _ask(database, RUNS_ASKED, [*values, *RUNNING])
    # In SQLite, Dagster's times are text in UTC that begins like this, so text is compared.
    since = f"{yesterday:%Y-%m-%d %H:%M:%S}"
    ((failed,),) = _ask(database, FAILED_ASKED, [*values, since]) or [(0,)]
    ((beat,),) = _ask(database, HEARTBEATS_ASKED, ()) or [(None,)]
    ticks = []
    for body, status in _ask(folder / base / TICKS_DATABASE, TICKS_ASKED, ()):
        tick = json.loads(body)
        error = tick.get("error") or {}
        # What a sensor raised is the cause of an error of Dagster's own, which names only the
        # sensor.
        reason = tick.get("skip_reason") or (error.get("cause") or error).get("message")
        if is_switched_on(settings, tick["job_name"], status):
            ticks += _tell_tick(tick["job_name"], tick["timestamp"], reason, bool(error))
    return Activity(
        # Without a daemon, nobody records the end of a run whose process was killed.
        [_tell_run(*run) for *run, process in runs if not (process and is_gone(process))],
        ticks,
        failed,
        datetime.fromtimestamp(beat, UTC) if beat else None,
    )


def _tell_run(run_id: str, status: str) -> str:
    return f"run {run_id[:8]} ({status.lower()})"


def _tell_tick(name: str, timestamp: float, reason: str | None, failed: bool) -> list[str]:
    """A tick that launched nothing; empty without a reason, or if a sensor that sends messages had
    none to send."""
    if not reason or (not failed and name.rpartition("__")[2] in NOTIFYING):
        return []
    if failed:
        # Dagster begins what was raised with its class, of which people know nothing.
        reason = re.sub(r"^(\w+\.)+\w+: ", "", reason)
    at, outcome = datetime.fromtimestamp(timestamp, UTC), "failed" if failed else "waits"
    return [f"{name} {outcome} ({at:%Y-%m-%d %H:%M} UTC): {reason.strip()}"]


def _ask(database: Path, question: str, values: Sequence[str]) -> list[tuple[Any, ...]]:
    if not database.exists():
        return []
    # A look is read-only, so it neither creates a database nor changes one that Dagster writes to.
    address = f"{database.resolve().as_uri()}?mode=ro"
    with closing(sqlite3.connect(address, uri=True)) as connection:
        return connection.execute(question, values).fetchall()


def _by_dagster(home: Path, settings: PipelineSettings) -> Activity:
    from dagster import DagsterInstance, DagsterRunStatus, RunsFilter

    active = RunsFilter(statuses=[DagsterRunStatus(status) for status in RUNNING])
    with DagsterInstance.from_config(str(home)) as instance:
        runs = [
            _tell_run(run.run_id, run.status.value)
            for run in instance.get_runs(active)
            if _is_own(run.tags, settings) and not is_gone(run.tags.get(PROCESS_TAG, ""))
        ]
        ticks = []
        for name, tick in last_ticks(instance, switched_on(instance, settings)).items():
            if tick.status.value in ("SKIPPED", "FAILURE"):
                error = tick.error and (tick.error.cause or tick.error)
                reason = tick.skip_reason or (error and error.message)
                ticks += _tell_tick(name, tick.timestamp, reason, error is not None)
        yesterday = datetime.now(UTC) - timedelta(days=1)
        failing = RunsFilter(statuses=[DagsterRunStatus.FAILURE], updated_after=yesterday)
        failed = sum(_is_own(run.tags, settings) for run in instance.get_runs(failing))
        beats = [beat.timestamp for beat in instance.get_daemon_heartbeats().values()]
        heartbeat = datetime.fromtimestamp(max(beats), UTC) if beats else None
        return Activity(runs, ticks, failed, heartbeat)


def _is_own(tags: Mapping[str, str], settings: PipelineSettings) -> bool:
    return tags.get(PIPELINE_TAG, settings.name) == settings.name


def switched_on(instance: "DagsterInstance", settings: PipelineSettings) -> list[Any]:
    """The states of the pipeline's sensors and schedules that tick."""
    return [
        state
        for state in instance.all_instigator_state()
        if is_switched_on(settings, state.instigator_name, state.status.value)
    ]


def last_ticks(instance: "DagsterInstance", states: Iterable[Any]) -> dict[str, Any]:
    """The last tick that ended of each of these sensors and schedules, by its name.

    The types of states and ticks are not part of Dagster's public interface.
    """
    ticks: dict[str, Any] = {}
    for state in states:
        # The newest may be under way, but at most one is, so two suffice.
        newest = instance.get_ticks(state.instigator_origin_id, state.selector_id, limit=2)
        ended = [tick for tick in newest if tick.status.value != "STARTED"]
        if ended:
            ticks[state.instigator_name] = ended[0]
    return ticks
