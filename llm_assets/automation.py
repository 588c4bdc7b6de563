"""When the graph is made by itself. Both are switched on in the Dagster UI."""

from dagster import (
    AssetSelection,
    OpExecutionContext,
    RunRequest,
    ScheduleDefinition,
    SensorDefinition,
    SkipReason,
    define_asset_job,
    job,
    op,
    sensor,
)

from artifacts.errors import UserError
from artifacts.store.identity import hash_json
from llm_assets.assets.stage import user_faults
from llm_assets.config import PipelineSettings
from llm_assets.maintenance.clean import clean
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.resource import RegistryResource
from llm_assets.sources.snapshot.snapshot import source_fingerprints

SENSOR_INTERVAL_SECONDS = 300


def retraining_schedule(settings: PipelineSettings) -> ScheduleDefinition:
    """Makes the whole graph at the pipeline's `retrain_cron`; only what changed is remade."""
    return ScheduleDefinition(
        name="weekly_retraining",
        job=define_asset_job("retraining", selection=AssetSelection.all()),
        cron_schedule=settings.retrain_cron,
    )


@op(pool="registry")
def clean_store(
    context: OpExecutionContext, pipeline: PipelineResource, registry: RegistryResource
) -> None:
    """Remove what the `retention` settings no longer keep; the log lists it first."""
    with user_faults():
        clean(
            pipeline.record,
            registry.open(pipeline),
            pipeline.settings.retention,
            delete=True,
            report=context.log.info,
        )


@job
def cleaning() -> None:
    """Removes what the `retention` settings no longer keep, as `llm-assets clean --yes` does."""
    clean_store()


def cleaning_schedule(settings: PipelineSettings) -> ScheduleDefinition:
    """Cleans the store at the settings' `retention.cron`; stopped until switched on."""
    return ScheduleDefinition(
        name="weekly_cleaning", job=cleaning, cron_schedule=settings.retention.cron
    )


def source_sensor() -> SensorDefinition:
    """Makes the whole graph when the source text is no longer that of the current raw corpus."""

    @sensor(
        name="source_text_changed",
        job=define_asset_job("retraining_on_change", selection=AssetSelection.all()),
        minimum_interval_seconds=SENSOR_INTERVAL_SECONDS,
    )
    def source_text_changed(pipeline: PipelineResource) -> RunRequest | SkipReason:
        try:
            now = source_fingerprints(pipeline.settings.raw_corpus, pipeline.store.root)
            current = pipeline.record.find_current("raw_corpus")
        except UserError as error:
            return SkipReason(str(error))
        if current and current.manifest.inputs == now:
            return SkipReason(f"The source text is still that of {current.fingerprint}.")
        before = current.manifest.inputs if current else {}
        changed = [name for name, value in now.items() if before.get(name) != value]
        return RunRequest(
            run_key=f"{hash_json(before)}-{hash_json(now)}",
            tags={"changed_sources": ", ".join(changed)},
        )

    return source_text_changed
