"""What people, or the clock, do with the graph: jobs and schedules, as the pipeline file says."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg
from pydantic import Field

from artifacts.storage.files import is_local
from llm_assets.assets.sources import source_specs
from llm_assets.assets.stage import asset_key, own_resources, user_faults
from llm_assets.automation.launched import PIPELINE_TAG, SCHEDULE, Runs
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import ServingPlatform
from llm_assets.endpoint.follow import serve_decision
from llm_assets.maintenance.cleaning import clean
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.resource import RegistryResource
from recipes.sections import BUDGETS

RETRAINING = "retraining"
REDEPLOYMENT = "redeployment"
CLEANING = "cleaning"
OBSERVATION = "observation"
ROLLBACK = "rollback"
NOTHING_TO_SET: dict[str, Any] = {}
"""Run config of a job that has no settings for one run. Without any, the launchpad fills in the
configuration of the resources."""


def build_jobs(settings: PipelineSettings, stages: Sequence[dg.AssetKey]) -> list[Any]:
    """All jobs of a pipeline, filled in as its file says; `retraining` makes these stages."""
    evaluation_keys = [asset_key(settings, name) for name in ("eval_metrics", "model_version")]
    tags, training = {PIPELINE_TAG: settings.name}, settings.checkpoint
    # What people change most for one run, with the pipeline file's values.
    as_in_the_file = {
        "budget": training.budget.model_dump(include=set(BUDGETS), exclude_none=True),
        "optimizer": {"learning_rate": training.optimizer.learning_rate},
        "seed": training.seed,
    }
    return [
        dg.define_asset_job(
            settings.dagster_name(RETRAINING),
            dg.AssetSelection.assets(*stages),
            config=training_config(settings, as_in_the_file),
            description="Reads the sources, trains, evaluates and, if the model is better, serves "
            "it. What has not changed is not rebuilt. The settings below apply to this run; "
            "you can add any other setting of an asset.",
            tags=tags,
            # A store in a bucket, which others may share, only its schedule cleans.
            hooks={_cleans_after(settings)} if is_local(settings.store) else None,
        ),
        dg.define_asset_job(
            settings.dagster_name("evaluation"),
            dg.AssetSelection.assets(*evaluation_keys),
            config=NOTHING_TO_SET,
            description="Evaluates the current checkpoint against the wanted version and asks the "
            "gate.",
            tags=tags,
        ),
        dg.define_asset_job(
            settings.dagster_name(REDEPLOYMENT),
            dg.AssetSelection.assets(asset_key(settings, "endpoint")),
            config=NOTHING_TO_SET,
            description="Serves the wanted version if it does not serve yet.",
            tags=tags,
        ),
        dg.define_asset_job(
            # This job lacks the pipeline's tag, since no training is launched while a run that has
            # it is under way (`Runs.unfinished`).
            settings.dagster_name(OBSERVATION),
            dg.AssetSelection.assets(*(spec.key for spec in source_specs(settings))),
            config=NOTHING_TO_SET,
            description="Checks whether the sources have changed, and builds nothing.",
        ),
        _rollback(settings),
        _cleaning(settings),
    ]


def training_config(settings: PipelineSettings, given: dict[str, Any]) -> dict[str, Any]:
    """Run config of `checkpoint`: settings, and how the run continues from earlier ones."""
    return {"ops": {settings.dagster_name("checkpoint"): {"config": given}}}


class RollbackConfig(dg.Config):
    """Who rolls back, and why."""

    name: str = Field(description="Who decides; recorded with the version.")
    reason: str = Field(description="Reason, recorded with the decision.")


def _rollback(settings: PipelineSettings) -> dg.JobDefinition:
    step = settings.dagster_name("roll_back_version")

    # In no pool: a run that trains holds its pools until it ends, and a rollback is an emergency.
    # The registry is changed by compare-and-set, and the endpoint has a lease, so this is safe.
    @dg.op(name=step)
    @own_resources(settings)
    def roll_back_version(
        context: dg.OpExecutionContext,
        config: RollbackConfig,
        pipeline: PipelineResource,
        registry: RegistryResource,
        serving: ServingPlatform,
    ) -> None:
        """Serve the version before the one that serves now."""
        with user_faults():
            models = registry.open(pipeline)
            target = models.roll_back(config.name, config.reason).version
            serve_decision(
                models,
                serving,
                pipeline.settings,
                pipeline.record,
                context.log.info,
                config.name,
                lambda wanted: wanted == target,
            )

    # The config gives the launchpad both keys to fill in; the registry refuses empty ones.
    return dg.GraphDefinition(
        settings.dagster_name(ROLLBACK),
        node_defs=[roll_back_version],
        description="Returns to the version before the one that serves, as `llm-assets rollback "
        "--reason REASON` does: it gets all traffic as soon as it answers. Say below who decides, "
        "and why.",
    ).to_job(config={"ops": {step: {"config": {"name": "", "reason": ""}}}})


def _cleaning(settings: PipelineSettings) -> dg.JobDefinition:
    @dg.op(name=settings.dagster_name("clean_store"), pool="registry")
    @own_resources(settings)
    def clean_store(
        context: dg.OpExecutionContext, pipeline: PipelineResource, registry: RegistryResource
    ) -> None:
        """Remove what the `retention` settings no longer keep; the log lists it first."""
        with user_faults():
            models = registry.open(pipeline)
            clean(pipeline.record, models, pipeline.settings, True, context.log.info)

    return dg.GraphDefinition(
        settings.dagster_name(CLEANING),
        node_defs=[clean_store],
        description="Removes what `retention` no longer keeps, as `llm-assets clean --yes` does.",
    ).to_job(config=NOTHING_TO_SET)


def _cleans_after(settings: PipelineSettings) -> dg.HookDefinition:
    """What cleans the store once a run has reached the end of the graph; if it fails, that is in
    the run's log, and the run has succeeded."""
    names = [settings.resource_key(name) for name in ("pipeline", "registry")]

    @dg.success_hook(required_resource_keys=frozenset(names))
    def clean_after(context: dg.HookContext) -> None:
        if context.op.name == settings.dagster_name("endpoint"):
            pipeline, registry = (getattr(context.resources, name) for name in names)
            models = registry.open(pipeline)
            clean(pipeline.record, models, pipeline.settings, True, context.log.info)

    return clean_after


def build_schedules(settings: PipelineSettings) -> list[dg.ScheduleDefinition]:
    """Retraining at `retrain_cron`, cleaning at `retention.cron`, and looks at the sources.

    A local store is cleaned unless somebody stops the schedule, one in the cloud only if somebody
    starts it.
    """
    automation, zone = settings.automation, settings.automation.time_zone
    on, off = dg.DefaultScheduleStatus.RUNNING, dg.DefaultScheduleStatus.STOPPED
    # Only a source in BigQuery has such a column, and each look at it is a query that costs money.
    is_billed = any(
        getattr(source, "watermark_column", None) for source in settings.raw_corpus.sources
    )
    return [
        _retraining(settings),
        dg.ScheduleDefinition(
            name=settings.dagster_name("weekly_cleaning"),
            job_name=settings.dagster_name(CLEANING),
            cron_schedule=settings.retention.cron,
            execution_timezone=zone,
            default_status=on if is_local(settings.store) else off,
            description="Removes what the `retention` settings no longer keep.",
        ),
        dg.ScheduleDefinition(
            name=settings.dagster_name("source_observation"),
            job_name=settings.dagster_name(OBSERVATION),
            cron_schedule=automation.observe_cron,
            execution_timezone=zone,
            default_status=on if automation.enabled or not is_billed else off,
            description="Records for each source whether it has changed, and builds nothing.",
        ),
    ]


def _retraining(settings: PipelineSettings) -> dg.ScheduleDefinition:
    @dg.schedule(
        name=settings.dagster_name(SCHEDULE),
        cron_schedule=settings.retrain_cron,
        job_name=settings.dagster_name(RETRAINING),
        execution_timezone=settings.automation.time_zone,
        default_status=dg.DefaultScheduleStatus.STOPPED,
        description="Materializes the graph at `retrain_cron`, except what has not changed. "
        "The sensor `source_text_changed` does so as soon as there is new text.",
    )
    def weekly_retraining(context: dg.ScheduleEvaluationContext) -> dg.RunRequest | dg.SkipReason:
        runs = Runs(context.instance, settings)
        # Not the tick's scheduled time, which is long past after an outage.
        now = datetime.now(UTC)
        if reason := runs.blackout(now) or runs.budget_spent(now):
            return dg.SkipReason(reason)
        # As the sensor does, so that both train the same model of the same text.
        given = {"continue_from_champion": settings.automation.continue_from_champion}
        # By its tag the run counts for the month's budget (`Runs.spent_hours`).
        return dg.RunRequest(run_config=training_config(settings, given), tags=runs.tags(SCHEDULE))

    return weekly_retraining
