"""The sensor that looks whether what serves is as good as it was when it was judged."""

from datetime import UTC, datetime

from dagster import (
    DefaultSensorStatus,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)

from llm_assets.assets.stage import user_faults
from llm_assets.automation.cursor import read_cursor
from llm_assets.automation.decision import Question, Wait, request_run
from llm_assets.automation.jobs import RETRAINING, Job, training_config
from llm_assets.automation.launched import QUALITY_SENSOR, Runs
from llm_assets.automation.notifications import tell_once
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import endpoint_folder
from llm_assets.endpoint.judged import judged_documents
from llm_assets.endpoint.live import LiveEndpoint, Requests
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.base import Registry
from llm_assets.registry.resource import RegistryResource
from serving import endpoint as process


def build_quality_sensor(
    settings: PipelineSettings, jobs: list[Job], status: DefaultSensorStatus
) -> SensorDefinition:
    """The sensor `serving_quality`."""

    @sensor(
        name=QUALITY_SENSOR,
        job=next(job for job in jobs if job.name == RETRAINING),
        minimum_interval_seconds=round(settings.automation.quality.check_minutes * 60),
        default_status=status,
        description="Asks the endpoint, as a client does, for its bits on the held-out text that "
        "its version was judged by, and counts the requests that failed. "
        "`automation.quality` says what is too much, and what happens then.",
    )
    def serving_quality(
        context: SensorEvaluationContext, pipeline: PipelineResource, registry: RegistryResource
    ) -> SensorResult:
        with user_faults():
            return _look(context, pipeline, registry.open(pipeline))

    return serving_quality


def _look(
    context: SensorEvaluationContext, pipeline: PipelineResource, models: Registry
) -> SensorResult:
    settings = pipeline.settings
    if settings.platform != "local":
        return SensorResult(skip_reason="Google Cloud's own alerts watch an endpoint there.")
    running = process.status(endpoint_folder(settings))
    champion = models.find("champion")
    if running is None or running.phase != "serving" or champion is None:
        return SensorResult(skip_reason="No endpoint serves; `endpoint_follows` looks after that.")
    with LiveEndpoint(running) as live:
        counted = live.requests()
        deviations = live.deviations(judged_documents(pipeline.store, champion))
    before = read_cursor(Requests, context.cursor)
    faults = [*_failures(counted, before, settings), *deviations]
    cursor = counted.model_dump_json()
    alarm = f"Version {champion.version} serves worse than it was: {' '.join(faults)}"
    tell_once(settings, pipeline.store, "quality", alarm if faults else None, context.log.warning)
    if not faults:
        return SensorResult(skip_reason=f"Version {champion.version} serves well.", cursor=cursor)
    if settings.automation.quality.then == "tell":
        return SensorResult(skip_reason=alarm, cursor=cursor)
    found = _retrain(context, settings, champion.version)
    if isinstance(found, Wait):
        return SensorResult(skip_reason=f"{alarm} {found.reason}", cursor=cursor)
    return SensorResult(run_requests=[found], cursor=cursor)


def _failures(now: Requests, before: Requests | None, settings: PipelineSettings) -> list[str]:
    quality, since = settings.automation.quality, now.since(before)
    if since.all < quality.least_requests or since.failed <= quality.most_failures * since.all:
        return []
    return [
        f"{since.failed:,} of {since.all:,} requests failed since the look before; "
        f"`automation.quality.most_failures` is {quality.most_failures:g}."
    ]


def _retrain(
    context: SensorEvaluationContext, settings: PipelineSettings, version: int
) -> RunRequest | Wait:
    runs, question = Runs(context.instance, settings), Question("quality", version)
    config = training_config({"continue_from_champion": True})
    return request_run(question, runs, datetime.now(UTC), QUALITY_SENSOR, config)
