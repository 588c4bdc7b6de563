"""The runs of a pipeline as Dagster recorded them, and whether another may be launched.

Blackout windows and the month's budget forbid it. A cursor is what a sensor remembers from one tick
to the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TypeVar
from zoneinfo import ZoneInfo

import dagster as dg
from pydantic import BaseModel, ValidationError

from artifacts.leases import is_gone
from llm_assets.assets.sources import GROUP as SOURCES
from llm_assets.assets.stage import failure_reason
from llm_assets.config import PipelineSettings
from llm_assets.history import AUTOMATED, PIPELINE_TAG, PROCESS_TAG
from llm_assets.operation_settings import DAYS, WINDOW

Remembered = TypeVar("Remembered", bound=BaseModel)


def read_cursor(model: type[Remembered], content: str | None) -> Remembered | None:
    """A cursor that was written as this model; None if there is none or its format is another."""
    try:
        return model.model_validate_json(content or "")
    except ValidationError:
        return None


LAUNCHED_BY_TAG = "llm_assets/launched_by"
QUESTION_TAG = "llm_assets/question"
LAST_EVENT_TAG = "llm_assets/last_event"
"""Of a run whose process died: when it was last heard of, in seconds since the epoch."""
SCHEDULE = "weekly_retraining"
UNFINISHED = [
    dg.DagsterRunStatus.QUEUED,
    dg.DagsterRunStatus.NOT_STARTED,
    dg.DagsterRunStatus.STARTING,
    dg.DagsterRunStatus.STARTED,
    dg.DagsterRunStatus.CANCELING,
]
# Dagster has no public name for this job; a test compares it with Dagster's own.
ASSET_JOB = "__ASSET_JOB"
"""What Dagster calls a run of assets that were chosen by hand."""
# Nor for what begins its message of a run whose process was killed.
DIED = "Run execution process for "
MOST_DAYS_OF_A_MONTH = 32
LAUNCHERS = [*AUTOMATED, SCHEDULE]
"""Whose runs count for the month's budget."""


@dataclass(frozen=True)
class Runs:
    """What was launched for one pipeline, and what keeps more from being launched.

    Times are given with a time zone.
    """

    instance: dg.DagsterInstance
    settings: PipelineSettings

    def tags(self, launched_by: str) -> dict[str, str]:
        return {PIPELINE_TAG: self.settings.name, LAUNCHED_BY_TAG: launched_by}

    def launched_for(self, question: str) -> Sequence[dg.RunRecord]:
        return self.instance.get_run_records(
            dg.RunsFilter(tags={PIPELINE_TAG: self.settings.name, QUESTION_TAG: question})
        )

    def unfinished(self) -> list[dg.DagsterRun]:
        """Those of this pipeline that wait or run, whoever launched them."""
        runs = self.instance.get_runs(dg.RunsFilter(statuses=UNFINISHED))
        # A killed run counts as running until `run_processes` looks. One that a command began has
        # its process in a tag, so it need not hold up others until then.
        return [run for run in runs if self.is_ours(run) and not has_died(run)]

    def is_ours(self, run: dg.DagsterRun) -> bool:
        """Whether a run is of this pipeline, as far as its tags and assets tell."""
        if PIPELINE_TAG in run.tags:
            return run.tags[PIPELINE_TAG] == self.settings.name
        # Assets that were chosen by hand run without our tags, so their keys have to tell.
        if not run.job_name.startswith(ASSET_JOB):
            return False
        beginning = [self.settings.key_prefix] if self.settings.key_prefix else []
        folders = (beginning, [*beginning, SOURCES])
        # Without a selection, Dagster names no asset: it is a run of all that the code location
        # has.
        keys = run.asset_selection or ()
        return not keys or any(key.path[:-1] in folders for key in keys)

    def blackout(self, now: datetime) -> str | None:
        """That nothing is launched at this time; None where it may be."""
        settings = self.settings.automation
        local = now.astimezone(ZoneInfo(settings.time_zone))
        for window in settings.blackouts:
            if is_within(window, local):
                return f"Nothing is launched during the blackout {window} ({settings.time_zone})."
        return None

    def budget_spent(self, now: datetime) -> str | None:
        """That nothing is launched since the month's budget is spent; None where it is not."""
        settings = self.settings.automation
        if settings.hours is None:
            return None
        spent = self.spent_hours(now)
        if spent < settings.hours:
            return None
        # `hours` is the smaller of the two limits, and the message names the one it came from.
        limit = (
            f"{settings.hours:g} hours"
            if settings.hours == settings.monthly_hours
            else f"{settings.monthly_cost:g} at {settings.cost_per_hour:g} per hour"
        )
        return (
            f"The month's budget is spent: {spent:.2f} hours of runs; the limit is {limit}. "
            "Launches resume next month; to launch earlier, raise `automation.monthly_hours` or "
            "`automation.monthly_cost`."
        )

    def spent_hours(self, now: datetime) -> float:
        """Hours that runs which automation launched have taken in the calendar month of the
        settings' time zone."""
        local = now.astimezone(ZoneInfo(self.settings.automation.time_zone))
        month_start = local.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
        launched = self.instance.get_run_records(
            dg.RunsFilter(
                tags={PIPELINE_TAG: self.settings.name, LAUNCHED_BY_TAG: LAUNCHERS},
                # Not since the month's first day: a run that began earlier may have no update in
                # this month.
                updated_after=now - timedelta(days=MOST_DAYS_OF_A_MONTH),
            )
        )
        return sum(_seconds_since(run, month_start, now.timestamp()) for run in launched) / 3600


def why_failed(instance: dg.DagsterInstance, run_id: str) -> str:
    """Why a run failed: as its steps say, else Dagster; empty where nobody does."""

    def told(kind: dg.DagsterEventType) -> Sequence[dg.EventLogEntry]:
        return instance.all_logs(run_id, of_type=kind)

    failed = [one.dagster_event for one in told(dg.DagsterEventType.STEP_FAILURE)]
    reasons = [f"{at.step_key}: {failure_reason(at.step_failure_data)}" for at in failed if at]
    if not reasons:
        # Dagster's failure of a run whose process was killed names no reason; an event before it
        # does. A run that could not be started has neither.
        messages = [one.message for one in told(dg.DagsterEventType.ENGINE_EVENT)]
        died = [message.partition("] ")[2] for message in messages if DIED in message]
        ended = [one.dagster_event for one in told(dg.DagsterEventType.RUN_FAILURE)]
        reasons = died[-1:] or [one.message or "" for one in ended if one]
    return " ".join(reasons)


def has_died(run: dg.DagsterRun) -> bool:
    """Whether the process on this machine that a run was started in is certainly gone."""
    holder = run.tags.get(PROCESS_TAG)
    return holder is not None and is_gone(holder)


def is_within(window: str, local: datetime) -> bool:
    """Whether a local time lies in a window such as `mon-fri 22:00-06:00`.

    A window that passes midnight belongs to the day on which it begins.
    """
    match = WINDOW.fullmatch(window)
    assert match is not None, "the settings hold valid windows"
    # These compare as text: hours have two digits, and `24:00` comes after every time of day.
    start, end, time = match["start"], match["end"], f"{local:%H:%M}"
    if start <= end:
        is_inside = start <= time < end
    else:
        is_inside = time >= start or time < end
        if time < end:
            local -= timedelta(days=1)
    if not is_inside or match["first"] is None:
        return is_inside
    first, last = (DAYS.index(day) for day in (match["first"], match["last"] or match["first"]))
    # Days are counted from the first one, so that `fri-mon` passes the end of the week.
    return (local.weekday() - first) % 7 <= (last - first) % 7


def _seconds_since(run: dg.RunRecord, start: float, now: float) -> float:
    if run.start_time is None:
        return 0.0
    end = run.end_time or now
    # Dagster dates the end of a dead run to when it was noticed: the machine may have been off.
    last_event = float(run.dagster_run.tags.get(LAST_EVENT_TAG, 0))
    # A run that Dagster launches again inherits the tags of the one before.
    if last_event > run.create_timestamp.timestamp():
        end = min(end, last_event)
    return max(0.0, end - max(run.start_time, start))
