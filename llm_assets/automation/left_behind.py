"""Ends jobs on Google Cloud whose run has ended without them, such as one that was killed."""

from datetime import UTC, datetime

from dagster import (
    DagsterInstance,
    DefaultSensorStatus,
    SensorDefinition,
    SensorEvaluationContext,
    SkipReason,
    sensor,
)

from artifacts.errors import UserError
from llm_assets.assets.stage import user_faults
from llm_assets.automation.launched import LEFT_BEHIND_SENSOR, Runs, has_died
from llm_assets.cloud.settings import load_cloud_settings
from llm_assets.cloud.spending import ActiveJob, active_jobs, end_jobs
from llm_assets.config import PipelineSettings

CHECK_SECONDS = 300
ADOPTION_SECONDS = 600.0
"""After its run's end a job waits so long for another run to follow it."""


def build_left_behind_sensor(settings: PipelineSettings) -> SensorDefinition:
    """The sensor `jobs_left_behind`, for a pipeline with work on Google Cloud."""

    @sensor(
        name=settings.dagster_name(LEFT_BEHIND_SENSOR),
        minimum_interval_seconds=CHECK_SECONDS,
        default_status=DefaultSensorStatus.RUNNING,
        description="Ends jobs on Google Cloud, with their machines, once their run has been over "
        "for ten minutes and no run of the pipeline is active, since that might follow them. "
        "`llm-assets machines` lists them.",
    )
    def jobs_left_behind(context: SensorEvaluationContext) -> SkipReason:
        with user_faults():
            cloud = load_cloud_settings()
            runs = Runs(context.instance, settings)
            jobs, unknown = active_jobs(cloud)
            left = [job for job in jobs if _is_left(context.instance, runs, job)]
            ended, refused = end_jobs(left, context.log.warning)
            told = f"Ended: {', '.join(job.job.name for job in ended)}" if ended else None
            if faults := [*unknown, *refused]:
                raise UserError("\n".join([*([told] if told else []), *faults]))
        return SkipReason(told)

    return jobs_left_behind


def _is_left(instance: DagsterInstance, runs: Runs, job: ActiveJob) -> bool:
    """Whether a job's run is over for good; False where this Dagster does not know the run."""
    record = instance.get_run_record_by_id(job.run)
    if record is None or not runs.is_ours(record.dagster_run):
        return False
    run = record.dagster_run
    if not run.is_finished and not has_died(run):
        return False
    ended = record.end_time or record.update_timestamp.timestamp()
    return datetime.now(UTC).timestamp() - ended > ADOPTION_SECONDS and not runs.unfinished()
