"""What happens at a time of day or week."""

from collections.abc import Iterator

from dagster import (
    DefaultScheduleStatus,
    RunRequest,
    ScheduleDefinition,
    ScheduleEvaluationContext,
    SkipReason,
    schedule,
)

from llm_assets.automation.jobs import RETRAINING, Job, cleaning, training_config
from llm_assets.automation.launched import SCHEDULE, Runs
from llm_assets.automation.limits import forbidden
from llm_assets.config import PipelineSettings


def build_schedules(settings: PipelineSettings, jobs: list[Job]) -> list[ScheduleDefinition]:
    """Retraining at `retrain_cron`, and cleaning at `retention.cron`, in the time zone set."""
    zone = settings.automation.time_zone
    return [
        _retraining(settings, next(job for job in jobs if job.name == RETRAINING)),
        ScheduleDefinition(
            name="weekly_cleaning",
            job=cleaning,
            cron_schedule=settings.retention.cron,
            execution_timezone=zone,
            description="Removes what the `retention` settings no longer keep.",
        ),
    ]


def _retraining(settings: PipelineSettings, job: Job) -> ScheduleDefinition:
    @schedule(
        name=SCHEDULE,
        cron_schedule=settings.retrain_cron,
        job=job,
        execution_timezone=settings.automation.time_zone,
        default_status=DefaultScheduleStatus.STOPPED,
        description="Makes the graph at `retrain_cron`; what has not changed is not made again. "
        "The sensor `source_text_changed` does it as soon as there is new text.",
    )
    def weekly_retraining(context: ScheduleEvaluationContext) -> Iterator[RunRequest | SkipReason]:
        runs = Runs(context.instance, settings)
        now = context.scheduled_execution_time
        if reason := forbidden(settings.automation, runs.by_automation(now), now):
            yield SkipReason(reason)
            return
        yield RunRequest(
            run_config=training_config(
                {"continue_from_champion": settings.automation.continue_from_champion}
            ),
            tags=runs.tags(SCHEDULE),
        )

    return weekly_retraining
