"""The alerts of infrastructure/prometheus/alerts.yml that can be told without Prometheus.

Their remedies are those of docs/operations.md.
"""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.filesize import decimal

from artifacts.store.store import Store
from llm_assets.config import PipelineSettings
from llm_assets.history import Activity, dagster_home

# The thresholds of alerts.yml, so that both warn of the same.
LEAST_FREE_BYTES = 10e9
MOST_SILENT_SECONDS = 300.0
MOST_FAILED = 3
"""Runs within a day."""
NEARLY_SPENT = 0.9
"""Of the month's budget."""


@dataclass(frozen=True)
class Alarm:
    """Something that a person has to do something about."""

    alert: str
    """Its name in alerts.yml."""
    text: str
    remedy: str
    """What to do, with commands and settings in backticks."""

    def __str__(self) -> str:
        return f"{self.text} What to do: {self.remedy}"


def find_alarms(
    settings: PipelineSettings, store: Store, activity: Activity, is_up: bool
) -> Iterator[Alarm]:
    """What is wrong by now.

    Args:
        activity: of this folder's history.
        is_up: whether the services are to run.
    """
    now = datetime.now(UTC)
    if activity.fault:
        yield Alarm("StateUnreadable", activity.fault, "follow it, then `llm-assets doctor`")
    if is_up and activity.heartbeat:
        silent = (now - activity.heartbeat).total_seconds()
        if silent > MOST_SILENT_SECONDS:
            text = f"The daemon has sent no heartbeat for {silent / 60:,.0f} minutes."
            remedy = "read `.llm_assets/services/daemon.log`; `llm-assets down`, then `up`"
            yield Alarm("DaemonSilent", text, remedy)
    if activity.failed > MOST_FAILED:
        text = f"{activity.failed:,} runs failed within a day."
        remedy = "the last run's log gives the reason; fix it and run `llm-assets run`"
        yield Alarm("RunsFail", text, remedy)
    hours = settings.automation.hours
    if hours is not None and not activity.fault:
        spent = _spent_hours(settings, now)
        if spent > NEARLY_SPENT * hours:
            text = f"Runs have used {spent:,.1f} of the month's {hours:,.1f} hours."
            limits = "`automation.monthly_hours` or `automation.monthly_cost`"
            remedy = f"raise {limits}, or wait for the next month"
            yield Alarm("BudgetNearlySpent", text, remedy)
    if store.is_local and Path(store.root).exists():
        free = shutil.disk_usage(store.root).free
        if free < LEAST_FREE_BYTES:
            text = f"Only {decimal(free)} are free for the store."
            yield Alarm("DiskNearlyFull", text, "`llm-assets clean --yes`; shorten `retention`")


def _spent_hours(settings: PipelineSettings, now: datetime) -> float:
    """Hours of this month's runs; 0 outside a project."""
    home = dagster_home(Path.cwd())
    if home is None:
        return 0.0
    # Dagster's import takes longer than all else of a command, and few have a budget.
    from dagster import DagsterInstance

    from llm_assets.automation.launched import Runs

    with DagsterInstance.from_config(str(home)) as instance:
        return Runs(instance, settings).spent_hours(now)
