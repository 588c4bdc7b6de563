"""What looks at the world every few minutes, and launches runs when it has changed."""

from dataclasses import replace
from datetime import UTC, datetime

from dagster import (
    DefaultSensorStatus,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)
from pydantic import BaseModel, ConfigDict

from artifacts.errors import OF_ONE_REQUEST, UserError
from artifacts.store import layout
from llm_assets.assets.sources import look, observe
from llm_assets.assets.stage import own_resources, user_faults
from llm_assets.automation.base_model import build_base_model_sensor
from llm_assets.automation.decision import (
    Surveys,
    TextQuestion,
    TextSnapshot,
    Wait,
    ask,
    name_of,
    request_run,
    text_of,
)
from llm_assets.automation.jobs import REDEPLOYMENT, RETRAINING, training_config
from llm_assets.automation.launched import ENDPOINT_SENSOR, TEXT_SENSOR, Runs, read_cursor
from llm_assets.automation.left_behind import build_left_behind_sensor
from llm_assets.automation.notifications import build_quality_sensor, conclude, tell_once
from llm_assets.automation.run_processes import build_processes_sensor
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.folder import endpoint_folder
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.base import Registry
from llm_assets.registry.resource import RegistryResource
from llm_assets.registry.start import find_manifest
from llm_assets.registry.state import ModelVersion, RegistryState
from serving.state import StateFolder
from spark_jobs.read.files.streams import SourceChanged

NEWEST_VERSIONS = 50
"""So many, and the wanted one, are asked which text they know; older ones were superseded."""


class Cursor(BaseModel):
    """What the text sensor remembers: since when the text has been as it is."""

    model_config = ConfigDict(extra="forbid")

    text: str
    since: float
    """Seconds since the epoch."""


def build_sensors(settings: PipelineSettings) -> list[SensorDefinition]:
    """The sensors of a pipeline."""
    return [
        _source_text_changed(settings),
        build_base_model_sensor(settings, _status(settings)),
        build_quality_sensor(settings, _status(settings)),
        _endpoint_follows(settings),
        build_processes_sensor(settings),
        *([build_left_behind_sensor(settings)] if settings.uses_cloud else ()),
    ]


def _source_text_changed(settings: PipelineSettings) -> SensorDefinition:
    @sensor(
        name=settings.dagster_name(TEXT_SENSOR),
        job_name=settings.dagster_name(RETRAINING),
        minimum_interval_seconds=settings.automation.check_seconds,
        default_status=_status(settings),
        description="Materializes the graph when the sources have text that the wanted model has "
        "not read. A run that fails is launched again, as often as `automation.retries` allows. A "
        "source that cannot be read fails the tick.",
    )
    @own_resources(settings)
    def source_text_changed(
        context: SensorEvaluationContext, pipeline: PipelineResource, registry: RegistryResource
    ) -> SensorResult:
        with user_faults():
            return _watch(context, pipeline, registry.open(pipeline))

    return source_text_changed


def _watch(
    context: SensorEvaluationContext, pipeline: PipelineResource, models: Registry
) -> SensorResult:
    settings, now = pipeline.settings, datetime.now(UTC)
    try:
        opened = look(pipeline)
    except SourceChanged as error:
        return SensorResult(skip_reason=f"{error}; checking again at the next tick")
    except UserError as error:
        told = str(error)
        lasting = OF_ONE_REQUEST.sub("", told)
        tell_once(settings, pipeline.store, "sources", told, context.log.warning, lasting)
        raise
    tell_once(settings, pipeline.store, "sources", None, context.log.warning)
    observe(context.instance, settings, opened)
    text, state = text_of(opened), models.state()
    known = _known_texts(pipeline, state)
    cursor = read_cursor(Cursor, context.cursor)
    if cursor is None or cursor.text != text.name or cursor.since > now.timestamp():
        cursor = Cursor(text=text.name, since=now.timestamp())
        surveys = Surveys(pipeline.store, settings.name)
        surveys.write(text)
        # A run under way may end as a version that knows one of the texts before.
        if not Runs(context.instance, settings).unfinished():
            surveys.keep({text.name, *known.values()})
    found = _decide(context, pipeline, state, known, text, cursor, now)
    return conclude(context, pipeline, "waiting", found, cursor.model_dump_json())


def _decide(
    context: SensorEvaluationContext,
    pipeline: PipelineResource,
    state: RegistryState,
    known: dict[int, str],
    text: TextSnapshot,
    cursor: Cursor,
    now: datetime,
) -> RunRequest | Wait:
    settings = pipeline.settings
    automation = settings.automation
    versions = [one for one in state.versions if known.get(one.version) == text.name]
    question = ask(text.name, state, versions, automation)
    if isinstance(question, Wait):
        return question
    before = known.get(question.against) if question.against is not None else None
    if reason := _too_early(pipeline, text, before, cursor, now):
        return Wait(reason)
    overrides = {"continue_from_champion": automation.continue_from_champion}
    config = training_config(settings, overrides | {"longer": question.longer})
    return request_run(question, Runs(context.instance, settings), now, TEXT_SENSOR, config)


def _too_early(
    pipeline: PipelineResource,
    text: TextSnapshot,
    before: str | None,
    cursor: Cursor,
    now: datetime,
) -> str | None:
    """Why the text is not trained on yet: it may go on changing, or too little of it is new."""
    settings = pipeline.settings
    changed = Surveys(pipeline.store, settings.name).changed_bytes(text, before)
    least = settings.automation.minimum_changed_megabytes * 1e6
    if text.is_all_files and changed is not None and changed <= least:
        if not changed:
            return "Files were only renamed: there is nothing to learn."
        return (
            f"{changed / 1e6:.3f} MB of the files differ from what the wanted model has read;"
            f" `automation.minimum_changed_megabytes` is {least / 1e6:g}."
        )
    quiet = settings.automation.quiet_minutes * 60
    waited = now.timestamp() - cursor.since
    if waited < quiet:
        return (
            f"The text changed {waited:.0f} s ago; waiting until it is unchanged for {quiet:.0f} s."
        )
    return None


def _known_texts(pipeline: PipelineResource, state: RegistryState) -> dict[int, str]:
    """The name of the text that each of the newest versions, and the wanted one, knows."""
    older, newest = state.versions[:-NEWEST_VERSIONS], state.versions[-NEWEST_VERSIONS:]
    wanted = state.find("wanted")
    return {
        version.version: name
        for version in [*(one for one in older if one == wanted), *newest]
        if (name := _text_of(pipeline, version))
    }


def _text_of(pipeline: PipelineResource, version: ModelVersion) -> str | None:
    """The name of the text that a version was trained on last; None of a base model."""
    fingerprint = version.lineage.get("raw_corpus")
    manifest = find_manifest(pipeline.store, "raw_corpus", fingerprint) if fingerprint else None
    return name_of(manifest.inputs) if manifest else None


def _endpoint_follows(settings: PipelineSettings) -> SensorDefinition:
    @sensor(
        name=settings.dagster_name(ENDPOINT_SENSOR),
        job_name=settings.dagster_name(REDEPLOYMENT),
        minimum_interval_seconds=settings.automation.check_seconds,
        default_status=_status(settings),
        description="Serves the wanted version if it is not serving: after a failed rollout, or "
        "when the endpoint has crashed. It retries as often as `automation.retries` allows.",
    )
    @own_resources(settings)
    def endpoint_follows(
        context: SensorEvaluationContext,
        pipeline: PipelineResource,
        registry: RegistryResource,
    ) -> SensorResult:
        with user_faults():
            found = _reconcile(context, pipeline, registry.open(pipeline).state())
        return conclude(context, pipeline, "endpoint", found)

    return endpoint_follows


def _reconcile(
    context: SensorEvaluationContext, pipeline: PipelineResource, state: RegistryState
) -> RunRequest | Wait:
    settings, now = pipeline.settings, datetime.now(UTC)
    wanted, champion = state.find("wanted"), state.find("champion")
    if wanted is None or champion is None:
        return Wait("Nothing has been served yet.")
    ended, folder = None, StateFolder(endpoint_folder(settings))
    is_local = settings.platform == "local"
    is_gone = is_local and folder.running is None
    stopped = layout.stopped(settings.name)
    is_stopped = folder.stopped_path.exists() if is_local else pipeline.store.has_file(stopped)
    if is_stopped and (is_gone or not is_local):
        # Whoever stopped it may have done so for what is wanted.
        return Wait("The endpoint was stopped, and stays so until `endpoint` is materialized.")
    if is_gone:
        # One that cannot start writes its status again each time, but not what it served.
        good = folder.good.path
        ended = good.stat().st_mtime_ns if good.exists() else "never"
    if wanted == champion and ended is None:
        return Wait(f"Version {wanted.version} is wanted and serving.")
    question = TextQuestion(f"serve-{ended or len(state.history)}", wanted.version)
    runs = Runs(context.instance, settings)
    request = request_run(question, runs, now, ENDPOINT_SENSOR, is_limited=False)
    if isinstance(request, Wait):
        reason = f"Version {wanted.version} is wanted, but does not serve. {request.reason}"
        return replace(request, reason=reason)
    return request


def _status(settings: PipelineSettings) -> DefaultSensorStatus:
    is_on = settings.automation.enabled
    return DefaultSensorStatus.RUNNING if is_on else DefaultSensorStatus.STOPPED
