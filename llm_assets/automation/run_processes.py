"""Fails runs whose process has died, which Dagster's launcher of local runs does not notice.

Otherwise a run that was going when the machine lost its power counts as running for ever, and all
runs that need the same pool wait for it.
"""

import re
from datetime import UTC, datetime
from pathlib import Path

from dagster import (
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DefaultRunLauncher,
    DefaultSensorStatus,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)

from artifacts.leases import process_started
from llm_assets.automation.launched import (
    ENDPOINT_SENSOR,
    LAST_EVENT_TAG,
    LAUNCHED_BY_TAG,
    PROCESSES_SENSOR,
    Runs,
    blackout,
    budget_spent,
    has_died,
)
from llm_assets.config import PipelineSettings

CHECK_SECONDS = 60
MAX_RETRIES_TAG = "dagster/max_retries"
"""How often Dagster launches a run again whose process died."""
STARTED = re.compile(r"Started process for run \(pid: (\d+)\)")
PROGRAMS = ("dagster", "multiprocessing")
"""One of these is in the command line of a process that runs a run."""


def build_processes_sensor(settings: PipelineSettings) -> SensorDefinition:
    """The sensor `run_processes`, which looks where the code server launches its runs."""

    @sensor(
        name=settings.dagster_name(PROCESSES_SENSOR),
        minimum_interval_seconds=CHECK_SECONDS,
        default_status=DefaultSensorStatus.RUNNING,
        description="Fails runs whose process on this machine has died, so that others need not "
        "wait for them and they can be launched again.",
    )
    def run_processes(context: SensorEvaluationContext) -> SkipReason:
        instance = context.instance
        died = [run for run in Runs(instance, settings).started() if _has_ended(instance, run)]
        for run in died:
            _tag(instance, settings, run)
            instance.report_run_failed(run, "The run's process ended without reporting why.")
        # Without a reason there is nothing that `llm-assets status` would tell.
        return SkipReason(f"Failed: {', '.join(run.run_id for run in died)}" if died else None)

    return run_processes


def _tag(instance: DagsterInstance, settings: PipelineSettings, run: DagsterRun) -> None:
    """Note of a run that died what is to be known before Dagster hears that it failed."""
    events = instance.get_records_for_run(run.run_id, limit=1, ascending=False).records
    for last in events:
        instance.add_run_tags(run.run_id, {LAST_EVENT_TAG: str(last.timestamp)})
    if run.tags.get(LAUNCHED_BY_TAG, ENDPOINT_SENSOR) == ENDPOINT_SENSOR:
        return
    automation, now = settings.automation, datetime.now(UTC)
    runs = Runs(instance, settings).by_automation(now)
    if blackout(automation, now) or budget_spent(automation, runs, now):
        # Dagster would launch it again at once; whatever asked for it does when it may.
        instance.add_run_tags(run.run_id, {MAX_RETRIES_TAG: "0"})


def _has_ended(instance: DagsterInstance, run: DagsterRun) -> bool:
    """Whether a run's process is gone; False where it is on another machine or not known."""
    if has_died(run):
        return True
    if not isinstance(instance.run_launcher, DefaultRunLauncher):
        return False
    events = instance.all_logs(run.run_id, of_type=DagsterEventType.ENGINE_EVENT)
    pids = [int(found[1]) for event in events if (found := STARTED.search(event.message))]
    return bool(pids) and not _is_there(pids[-1])


def _is_there(pid: int) -> bool:
    if process_started(pid) is None:
        return False
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    return any(program in command for program in PROGRAMS)
