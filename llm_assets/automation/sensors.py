"""What looks at the world every few minutes, and launches runs when it has changed.

The source text, the base model, the endpoint that should serve, and how well it serves.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import dagster as dg
from pydantic import BaseModel, ConfigDict

from artifacts.errors import OF_ONE_REQUEST, UserError
from artifacts.store import layout
from artifacts.store.identity import hash_json
from artifacts.store.manifest import Manifest
from artifacts.store.pipelines import Pipeline
from llm_assets import history
from llm_assets.assets.sources import look, observe
from llm_assets.assets.stage import own_resources, user_faults
from llm_assets.automation.dead_runs import build_dead_run_sensors
from llm_assets.automation.decision import (
    Surveys,
    TextQuestion,
    TextSnapshot,
    Wait,
    ask,
    request_run,
    text_of,
)
from llm_assets.automation.jobs import REDEPLOYMENT, RETRAINING, training_config
from llm_assets.automation.launched import Runs, read_cursor
from llm_assets.automation.notifications import conclude, tell_once, tick_result
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import LiveEndpoint, Requests, endpoint_folder, judged_documents
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.base import Registry
from llm_assets.registry.resource import RegistryResource
from llm_assets.registry.start import find_manifest
from llm_assets.registry.state import ModelVersion, RegistryState
from recipes.model.base_model import identify, source_files
from serving import endpoint as process
from serving.comparison import JudgedDocument
from serving.state import StateFolder
from spark_jobs.read.files.streams import SourceChanged

Look = Callable[[dg.SensorEvaluationContext, PipelineResource, Registry], dg.SensorResult]
"""One tick of a sensor."""


def build_sensors(settings: PipelineSettings) -> list[dg.SensorDefinition]:
    """The sensors of a pipeline."""
    every = settings.automation.check_seconds
    return [
        _sensor(
            settings,
            history.TEXT_SENSOR,
            RETRAINING,
            every,
            _look_at_text,
            "Materializes the graph when the sources have text that the wanted model has not read. "
            "A run that fails is launched again, as often as `automation.retries` allows. A source "
            "that cannot be read fails the tick.",
        ),
        _sensor(
            settings,
            history.BASE_MODEL_SENSOR,
            RETRAINING,
            every,
            _look_at_base_model,
            "Checks whether the base model's folder or package has weights other than those "
            "trained on, or the Hub a revision other than the pinned one, which it only reports. "
            "`automation.new_base_model` says what happens with other weights.",
        ),
        _sensor(
            settings,
            history.QUALITY_SENSOR,
            RETRAINING,
            QUALITY_SECONDS,
            _look_at_quality,
            "Counts the requests to the endpoint that failed and, for plain text, measures bits "
            "per byte as a client would, on held-out documents of its version's evaluation. "
            "`automation.quality` says how many may fail, and what happens otherwise.",
        ),
        _sensor(
            settings,
            history.ENDPOINT_SENSOR,
            REDEPLOYMENT,
            every,
            _look_at_endpoint,
            "Serves the wanted version if it is not serving: after a failed rollout, or when the "
            "endpoint has crashed. It retries as often as `automation.retries` allows.",
        ),
        *build_dead_run_sensors(settings),
    ]


def _sensor(
    settings: PipelineSettings,
    name: str,
    job: str,
    seconds: int,
    look_once: Look,
    description: str,
) -> dg.SensorDefinition:
    """A sensor that `automation.enabled` switches on."""
    is_on = settings.automation.enabled

    @dg.sensor(
        name=settings.dagster_name(name),
        job_name=settings.dagster_name(job),
        minimum_interval_seconds=seconds,
        default_status=dg.DefaultSensorStatus.RUNNING if is_on else dg.DefaultSensorStatus.STOPPED,
        description=description,
    )
    @own_resources(settings)
    def tick(
        context: dg.SensorEvaluationContext, pipeline: PipelineResource, registry: RegistryResource
    ) -> dg.SensorResult:
        with user_faults():
            return look_once(context, pipeline, registry.open(pipeline))

    return tick


class Watched(BaseModel):
    """A cursor: since when what a sensor watches has been as it is."""

    model_config = ConfigDict(extra="forbid")

    state: str
    """A hash of it."""
    since: float
    """Seconds since the epoch."""
    identity: str = ""
    """What a base model's files hold; empty until they have been unchanged for a while."""

    @classmethod
    def at(cls, now: float, state: str, cursor: str | None) -> "Watched":
        """What a cursor says of this state; new, from now on, where it says nothing of it."""
        known = read_cursor(cls, cursor)
        # By a clock that was put back, the time to wait would be anything.
        is_known = known is not None and known.state == state and known.since <= now
        return known if known and is_known else cls(state=state, since=now)


NEWEST_VERSIONS = 50
"""So many, and the wanted one, are asked which text they know; older ones were superseded."""


def _look_at_text(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, models: Registry
) -> dg.SensorResult:
    settings, now = pipeline.settings, datetime.now(UTC)
    try:
        opened = look(pipeline)
    except SourceChanged as error:
        return dg.SensorResult(skip_reason=f"{error}; checking again at the next tick")
    except UserError as error:
        told = str(error)
        lasting = OF_ONE_REQUEST.sub("", told)
        tell_once(settings, pipeline.store, "sources", told, context.log.warning, lasting)
        raise
    tell_once(settings, pipeline.store, "sources", None, context.log.warning)
    observe(context.instance, settings, opened)
    text, state = text_of(opened), models.state()
    known = _known_texts(pipeline, state)
    cursor = Watched.at(now.timestamp(), text.name, context.cursor)
    if cursor.since == now.timestamp():
        surveys = Surveys(pipeline.store, settings.name)
        surveys.write(text)
        # A run under way may end as a version that knows one of the texts before.
        if not Runs(context.instance, settings).unfinished():
            surveys.keep({text.name, *known.values()})
    found = _decide_on_text(context, pipeline, state, known, text, cursor, now)
    return conclude(context, pipeline, "waiting", found, cursor.model_dump_json())


def _decide_on_text(
    context: dg.SensorEvaluationContext,
    pipeline: PipelineResource,
    state: RegistryState,
    known: dict[int, str],
    text: TextSnapshot,
    cursor: Watched,
    now: datetime,
) -> dg.RunRequest | Wait:
    settings = pipeline.settings
    automation = settings.automation
    versions = [one for one in state.versions if known.get(one.version) == text.name]
    question = ask(text.name, state, versions, automation)
    if isinstance(question, Wait):
        return question
    before = known.get(question.against) if question.against is not None else None
    changed = Surveys(pipeline.store, settings.name).changed_bytes(text, before)
    least = automation.minimum_changed_megabytes * 1e6
    if text.is_all_files and changed is not None and changed <= least:
        if not changed:
            return Wait("Files were only renamed: there is nothing to learn.")
        return Wait(
            f"{changed / 1e6:.3f} MB of the files differ from what the wanted model has read;"
            f" `automation.minimum_changed_megabytes` is {least / 1e6:g}."
        )
    quiet, waited = automation.quiet_minutes * 60, now.timestamp() - cursor.since
    if waited < quiet:
        return Wait(
            f"The text changed {waited:.0f} s ago; waiting until it is unchanged for {quiet:.0f} s."
        )
    overrides = {"continue_from_champion": automation.continue_from_champion}
    config = training_config(settings, overrides | {"longer": question.longer})
    return request_run(question, Runs(context.instance, settings), now, history.TEXT_SENSOR, config)


def _known_texts(pipeline: PipelineResource, state: RegistryState) -> dict[int, str]:
    """The name of the text that each of the newest versions, and the wanted one, was trained on
    last; base models were on none."""
    older, newest = state.versions[:-NEWEST_VERSIONS], state.versions[-NEWEST_VERSIONS:]
    wanted, known = state.find("wanted"), {}
    for version in [*(one for one in older if one == wanted), *newest]:
        fingerprint = version.lineage.get("raw_corpus")
        if fingerprint and (made := find_manifest(pipeline.store, "raw_corpus", fingerprint)):
            known[version.version] = hash_json(made.inputs)
    return known


HUB_SECONDS = 10.0
BASE = "base_model"


def _look_at_base_model(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, models: Registry
) -> dg.SensorResult:
    # Of a model on the Hub, which is pinned, there is nothing to remember.
    is_on_hub = pipeline.settings.base_model.hub is not None
    known = None if is_on_hub else _watch_files(pipeline.settings, context.cursor)
    found = _decide_on_base_model(context, pipeline, known)
    cursor = known.model_dump_json() if known else None
    return conclude(context, pipeline, "base_model", found, cursor)


def _watch_files(settings: PipelineSettings, cursor: str | None) -> Watched:
    """What the base model's files hold now.

    Files that may still be copied are not read: half of another model is one, too.
    """
    now = datetime.now(UTC).timestamp()
    found = [(path.name, path.stat()) for path in source_files(settings.base_model)]
    state = [(name, one.st_size, one.st_mtime_ns) for name, one in found]
    known = Watched.at(now, hashlib.sha256(repr(state).encode()).hexdigest(), cursor)
    if known.identity or now - known.since < settings.automation.quiet_minutes * 60:
        return known
    return known.model_copy(update={"identity": hash_json(identify(settings.base_model))})


def _decide_on_base_model(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, known: Watched | None
) -> dg.RunRequest | Wait:
    settings, base = pipeline.settings, pipeline.settings.base_model
    if settings.automation.new_base_model == "ignore":
        return Wait("`automation.new_base_model` is `ignore`.")
    if known is None:
        with pipeline.hub_access():
            return _compare_with_hub(str(base.hub), str(base.revision))
    if not known.identity:
        quiet = settings.automation.quiet_minutes
        return Wait(
            f"The base model's files changed less than {quiet:g} minutes ago; waiting until they "
            "are unchanged for that long."
        )
    trained_on = _trained_on(pipeline.record)
    if trained_on is None:
        return Wait("No base model has been read yet.")
    if hash_json(trained_on.settings) == known.identity:
        return Wait("The base model is the one that was trained on.")
    if settings.automation.new_base_model == "tell":
        return Wait(
            f"The base model in {base.folder or base.package} is not the one that the model was "
            "trained on. To train from it, materialize the graph; `automation.new_base_model: "
            "retrain` does so automatically.",
            is_alarm=True,
        )
    question = TextQuestion(f"base-{known.identity}", None)
    runs = Runs(context.instance, settings)
    return request_run(question, runs, datetime.now(UTC), history.BASE_MODEL_SENSOR)


def _trained_on(record: Pipeline) -> Manifest | None:
    """The base model behind the newest model; before there is one, the base model that was read.

    Other weights are read at the beginning of a run, which may fail before they are trained from.
    """
    for made in map(record.find_current, ("eval_metrics", "checkpoint")):
        if made and (base := find_manifest(record.store, BASE, made.manifest.inputs[BASE])):
            return base
    read = record.find_current(BASE)
    return read.manifest if read else None


def _compare_with_hub(name: str, pinned: str) -> Wait:
    newest = newest_revision(name)
    if newest is None:
        return Wait(f"The Hub cannot be reached for {name}, and this machine has no copy of it.")
    if newest == pinned:
        return Wait(f"{name} on the Hub is at the pinned revision.")
    return Wait(
        f"{name} on the Hub is at revision {newest}, but `base_model.revision` pins {pinned}. To "
        "train from the new one, set it there.",
        is_alarm=True,
    )


def newest_revision(name: str) -> str | None:
    """The commit that a Hub model's main branch is at, as the Hub says.

    Where the Hub cannot be asked, the one that this machine's cache saw last; None where it has
    none.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    try:
        return HfApi().model_info(name, timeout=HUB_SECONDS).sha
    except Exception:  # The Hub's own errors, or whichever those of its HTTP client are.
        folder = repo_folder_name(repo_id=name, repo_type="model")
        seen = Path(constants.HF_HUB_CACHE) / folder / "refs" / "main"
        return seen.read_text().strip() if seen.exists() else None


def _look_at_endpoint(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, models: Registry
) -> dg.SensorResult:
    found = _decide_on_endpoint(context, pipeline, models.state())
    return conclude(context, pipeline, "endpoint", found)


def _decide_on_endpoint(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, state: RegistryState
) -> dg.RunRequest | Wait:
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
    request = request_run(question, runs, now, history.ENDPOINT_SENSOR, is_limited=False)
    if isinstance(request, Wait):
        reason = f"Version {wanted.version} is wanted, but does not serve. {request.reason}"
        return replace(request, reason=reason)
    return request


QUALITY_SECONDS = 15 * 60
"""Between two looks at the endpoint, each of which asks for its bits on held-out text."""
MOST_TIMES_LONGER = 8
"""Than usual, of a training that is to make a version serve as well as before."""
ANSWER_SECONDS, LOOK_SECONDS = 20.0, 40.0
"""For one answer of the endpoint and for all of a look: Dagster ends a tick after 60 s."""
SILENCE = "quality_silence"
"""Topic of an endpoint that does not answer."""
LEAST_REQUESTS = 20
"""Fewer say nothing about the share that failed."""


def _look_at_quality(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, models: Registry
) -> dg.SensorResult:
    settings = pipeline.settings
    if settings.platform != "local":
        return dg.SensorResult(skip_reason="Google Cloud's own alerts watch an endpoint there.")
    running = process.status(endpoint_folder(settings))
    state = models.state()
    champion = state.find("champion")
    if running is None or running.phase != "serving" or champion is None:
        return dg.SensorResult(
            skip_reason="No endpoint is serving; `endpoint_follows` takes care of that."
        )
    documents = judged_documents(pipeline.store, champion)
    with LiveEndpoint(running, ANSWER_SECONDS, LOOK_SECONDS) as live:
        before = read_cursor(Requests, context.cursor)
        found, counted = _ask(live, documents, before, settings)
    told: list[str] = []
    for topic, faults in found.items():
        what = "cannot be checked" if topic == SILENCE else "performs worse than before"
        alarm = f"Version {champion.version} {what}: {' '.join(faults)}" if faults else None
        # Each look counts other requests.
        counted_as = f"{champion.version}: {len(faults)} faults"
        tell_once(settings, pipeline.store, topic, alarm, context.log.warning, counted_as)
        if alarm:
            told.append(alarm)
    cursor = counted.model_dump_json() if counted else context.cursor
    if not told:
        return tick_result(Wait(f"Version {champion.version} serves well."), cursor)
    alarm = " ".join(told)
    # No training helps an endpoint that does not answer.
    may_help = any(faults for topic, faults in found.items() if topic != SILENCE)
    if settings.automation.quality.then == "tell" or not may_help:
        return tick_result(Wait(alarm), cursor)
    request = _retrain(context, settings, state.find("wanted"), champion.version)
    if isinstance(request, Wait):
        request = Wait(f"{alarm} {request.reason}")
    return tick_result(request, cursor)


def _ask(
    live: LiveEndpoint,
    documents: Sequence[JudgedDocument],
    before: Requests | None,
    settings: PipelineSettings,
) -> tuple[dict[str, list[str]], Requests | None]:
    """What one look finds wrong, in words by topic, and from where on the next one counts.

    A topic of which nobody knows is left out: it is neither told nor taken back.
    """
    found: dict[str, list[str]] = {}
    cursor = None
    try:
        counted = live.requests()
        since = counted.since(before)
        if since.all >= LEAST_REQUESTS:
            found["quality"], cursor = _failures(since, settings), counted
        else:
            # So that requests of several looks add up.
            cursor = counted.minus(since)
        found["quality_bits"] = live.deviations(documents)
        found[SILENCE] = []
    except UserError as error:
        found[SILENCE] = [str(error)]
    if cursor:
        with suppress(UserError):
            # What was asked here is no client's request.
            cursor = cursor.plus(live.requests().since(counted))
    return found, cursor


def _failures(since: Requests, settings: PipelineSettings) -> list[str]:
    quality = settings.automation.quality
    if since.failed <= quality.most_failures * since.all:
        return []
    return [
        f"{since.failed:,} of {since.all:,} requests failed since the last check; "
        f"`automation.quality.most_failures` is {quality.most_failures:g}."
    ]


def _retrain(
    context: dg.SensorEvaluationContext,
    settings: PipelineSettings,
    wanted: ModelVersion | None,
    version: int,
) -> dg.RunRequest | Wait:
    if wanted is None or wanted.version != version:
        named = f"version {wanted.version}" if wanted else "none"
        return Wait(f"It is not trained further, since {named} is wanted.")
    runs, question = Runs(context.instance, settings), TextQuestion("quality", version)
    asked = runs.asking(question.name)
    # What the same training made did not help.
    helpless = sum(run.dagster_run.status is dg.DagsterRunStatus.SUCCESS for run in asked)
    # The text may be unchanged, and what was made from it would be found again.
    longer = 2**helpless
    if longer > MOST_TIMES_LONGER:
        told = f"Training it further, up to {MOST_TIMES_LONGER} times as long, did not help."
        return Wait(told, is_alarm=True)
    given = {"continue_from_champion": True, "from_version": version, "longer": longer}
    config = training_config(settings, given)
    return request_run(question, runs, datetime.now(UTC), history.QUALITY_SENSOR, config)
