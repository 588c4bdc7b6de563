"""Clears up after runs that have died: fails them, and ends what they left on Google Cloud.

Dagster's launcher of local runs does not notice that a process died. Without this, a run that was
going when the machine lost power would count as running for ever, and all runs that need the same
pool would wait for it.
"""

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import dagster as dg

from artifacts.errors import UserError
from llm_assets.assets.stage import user_faults
from llm_assets.automation.launched import LAST_EVENT_TAG, LAUNCHED_BY_TAG, Runs, has_died
from llm_assets.cloud.settings import load_cloud_settings
from llm_assets.cloud.spending import ActiveJob, active_jobs, end_jobs
from llm_assets.config import PipelineSettings
from llm_assets.history import ENDPOINT_SENSOR

PROCESSES_SECONDS, JOBS_SECONDS = 60, 300
"""Between two looks at the processes, and at the jobs."""
ADOPTION_SECONDS = 600.0
"""How long a job is left alone after its run ended, since another run may follow it."""
MAX_RETRIES_TAG = "dagster/max_retries"
"""How often Dagster launches a run again whose process died."""
# Dagster has no public name for this message; a test compares it with Dagster's own.
STARTED = re.compile(r"Started process for run \(pid: (\d+)\)")
PROGRAMS = ("dagster", "multiprocessing")
"""One of these is in the command line of a process that runs a run."""


def build_dead_run_sensors(settings: PipelineSettings) -> list[dg.SensorDefinition]:
    """The sensor of runs and, for a pipeline with work on Google Cloud, the one of jobs."""
    of_jobs = [_jobs_left_behind(settings)] if settings.uses_cloud else []
    return [_run_processes(settings), *of_jobs]


def _run_processes(settings: PipelineSettings) -> dg.SensorDefinition:
    """The sensor `run_processes`, which looks where the code server launches its runs."""

    @dg.sensor(
        name=settings.dagster_name("run_processes"),
        minimum_interval_seconds=PROCESSES_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Fails runs whose process on this machine has died, so that others need not "
        "wait for them and they can be launched again.",
    )
    def run_processes(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        instance, runs = context.instance, Runs(context.instance, settings)
        # First, since Dagster may launch a run again as soon as it is reported as failed.
        _hold_back(runs, datetime.now(UTC))
        # Only those that have started are looked at: Dagster's run monitoring (dagster.yaml) fails
        # those that never start.
        started = instance.get_runs(dg.RunsFilter(statuses=[dg.DagsterRunStatus.STARTED]))
        died = [run for run in started if runs.is_ours(run) and _has_ended(instance, run)]
        for run in died:
            for event in instance.get_records_for_run(run.run_id, limit=1, ascending=False).records:
                instance.add_run_tags(run.run_id, {LAST_EVENT_TAG: str(event.timestamp)})
            instance.report_run_failed(run, "The run's process ended without reporting why.")
        # Without a reason there is nothing that `llm-assets status` would tell.
        return dg.SkipReason(f"Failed: {', '.join(run.run_id for run in died)}" if died else None)

    return run_processes


def _hold_back(runs: Runs, now: datetime) -> None:
    """Have Dagster launch no run again that dies while automation launches none.

    That is said of runs that live: of one that the kernel killed, the code server tells Dagster,
    and asks nobody before. Whatever asked for such a run asks again when it may.
    """
    # Blackouts and the budget hold back neither the runs of people, which have no such tag, nor
    # those of the endpoint's sensor.
    limited = [
        run
        for run in runs.unfinished()
        if run.tags.get(LAUNCHED_BY_TAG, ENDPOINT_SENSOR) != ENDPOINT_SENSOR
    ]
    # What begins before the next look counts already, even where that comes late.
    moments = [now + timedelta(seconds=PROCESSES_SECONDS * looks) for looks in range(3)]
    is_held = bool(limited) and any(runs.blackout(at) or runs.budget_spent(at) for at in moments)
    most = 0 if is_held else runs.instance.run_retries_max_retries
    for run in limited:
        if (run.tags.get(MAX_RETRIES_TAG) == "0") != is_held:
            runs.instance.add_run_tags(run.run_id, {MAX_RETRIES_TAG: str(most)})


def _has_ended(instance: dg.DagsterInstance, run: dg.DagsterRun) -> bool:
    """Whether a run's process is gone; False where it is on another machine or not known."""
    if has_died(run):
        return True
    # Another launcher may start runs on other machines, whose process ids mean nothing here.
    if not isinstance(instance.run_launcher, dg.DefaultRunLauncher):
        return False
    events = instance.all_logs(run.run_id, of_type=dg.DagsterEventType.ENGINE_EVENT)
    pids = [int(found[1]) for event in events if (found := STARTED.search(event.message))]
    return bool(pids) and not _is_there(pids[-1])


def _is_there(pid: int) -> bool:
    # A process that has ended and is not waited for yet has no command line.
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return False
    # By now the number may belong to another program: the run's own process is gone then.
    return any(program in command for program in PROGRAMS)


def _jobs_left_behind(settings: PipelineSettings) -> dg.SensorDefinition:
    @dg.sensor(
        name=settings.dagster_name("jobs_left_behind"),
        minimum_interval_seconds=JOBS_SECONDS,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description="Ends jobs on Google Cloud, with their machines, once their run has been over "
        "for ten minutes and no run of the pipeline is active, since that might follow them. "
        "`llm-assets machines` lists them.",
    )
    def jobs_left_behind(context: dg.SensorEvaluationContext) -> dg.SkipReason:
        with user_faults():
            cloud = load_cloud_settings()
            runs = Runs(context.instance, settings)
            jobs, unknown = active_jobs(cloud)
            orphans = [job for job in jobs if _is_left(context.instance, runs, job)]
            ended, refused = end_jobs(orphans, context.log.warning)
            summary = f"Ended: {', '.join(job.job.name for job in ended)}" if ended else None
            # The tick fails, since a job that could not be listed or ended may go on costing money.
            if faults := [*unknown, *refused]:
                raise UserError("\n".join([*([summary] if summary else []), *faults]))
        return dg.SkipReason(summary)

    return jobs_left_behind


def _is_left(instance: dg.DagsterInstance, runs: Runs, job: ActiveJob) -> bool:
    """Whether a job's run is over for good; False where this Dagster does not know the run."""
    record = instance.get_run_record_by_id(job.run)
    if record is None or not runs.is_ours(record.dagster_run):
        return False
    run = record.dagster_run
    if not run.is_finished and not has_died(run):
        return False
    # A run whose process died has no end on record until `run_processes` has reported it.
    end_time = record.end_time or record.update_timestamp.timestamp()
    # Another run of the pipeline may continue the job, so none may be waiting or running.
    return datetime.now(UTC).timestamp() - end_time > ADOPTION_SECONDS and not runs.unfinished()
