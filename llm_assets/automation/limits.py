"""When nothing may be launched: blackout windows, and the month's budget."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from zoneinfo import ZoneInfo

from dagster import RunRecord

from llm_assets.operation_settings import DAYS, WINDOW, AutomationSettings


def forbidden(settings: AutomationSettings, runs: Iterable[RunRecord], now: datetime) -> str | None:
    """Why nothing may be launched now; None where it may.

    Args:
        runs: those that automation launched, of this month at least.
        now: with a time zone.
    """
    local = now.astimezone(ZoneInfo(settings.time_zone))
    for window in settings.blackouts:
        if is_within(window, local):
            return f"Nothing is launched within the blackout {window} ({settings.time_zone})."
    if settings.hours is None:
        return None
    spent = spent_hours(settings, runs, now)
    if spent < settings.hours:
        return None
    limit = (
        f"{settings.monthly_cost:g} at {settings.cost_per_hour:g} an hour"
        if settings.monthly_cost
        else f"{settings.hours:g} hours"
    )
    return (
        f"The month's budget is spent: {spent:.2f} hours of runs, of {limit}. Launches go on next "
        "month, or raise `automation.monthly_hours` or `automation.monthly_cost`."
    )


def spent_hours(settings: AutomationSettings, runs: Iterable[RunRecord], now: datetime) -> float:
    """Hours that runs have taken in the calendar month of the settings' time zone."""
    local = now.astimezone(ZoneInfo(settings.time_zone))
    began = local.replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
    return sum(_seconds_since(run, began, now.timestamp()) for run in runs) / 3600


def is_within(window: str, local: datetime) -> bool:
    """Whether a local time lies in a window such as `mon-fri 22:00-06:00`.

    A window that passes midnight belongs to the day on which it begins.
    """
    found = WINDOW.fullmatch(window)
    assert found is not None, "the settings hold valid windows"
    time = f"{local:%H:%M}"
    start, end = found["start"], found["end"]
    if start <= end:
        return start <= time < end and _has_day(found["first"], found["last"], local)
    if time >= start:
        return _has_day(found["first"], found["last"], local)
    return time < end and _has_day(found["first"], found["last"], local - timedelta(days=1))


def _has_day(first: str | None, last: str | None, local: datetime) -> bool:
    if first is None:
        return True
    begin, end = DAYS.index(first), DAYS.index(last or first)
    return (local.weekday() - begin) % 7 <= (end - begin) % 7


def _seconds_since(run: RunRecord, began: float, now: float) -> float:
    if run.start_time is None:
        return 0.0
    return max(0.0, (run.end_time or now) - max(run.start_time, began))
