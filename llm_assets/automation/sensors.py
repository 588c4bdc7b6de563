"""What looks at the world every few minutes, and launches runs when it has changed.

The source text, the base model, the endpoint that should serve, and last how well it serves.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import BaseModel, ConfigDict

from artifacts.errors import OF_ONE_REQUEST, UserError, materialize_command
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
from llm_assets.automation.launched import LAUNCHED_BY_TAG, Runs, read_cursor
from llm_assets.automation.notifications import conclude, tell_once, tick_result
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import LiveEndpoint, Requests, endpoint_folder, judged_documents
from llm_assets.endpoint.folder import endpoint_status, why_unable
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.base import Registry
from llm_assets.registry.resource import RegistryResource
from llm_assets.registry.start import find_manifest, has_base
from llm_assets.registry.state import ModelVersion, RegistryState
from recipes.model.base_model import identify, source_files
from serving.comparison import JudgedDocument
from serving.state import StateFolder
from spark_jobs.read.files.streams import SourceChanged

Look = Callable[[dg.SensorEvaluationContext, PipelineResource, Registry], dg.SensorResult]
"""One tick of a sensor."""


def build_sensors(settings: PipelineSettings) -> list[dg.SensorDefinition]:
    interval = settings.automation.check_seconds
    return [
        _sensor(
            settings,
            history.TEXT_SENSOR,
            RETRAINING,
            interval,
            _look_at_text,
            "Materializes the graph when the sources have text that the wanted model has not read. "
            "A run that fails is launched again, as often as `automation.retries` allows. A source "
            "that cannot be read fails the tick.",
        ),
        _sensor(
            settings,
            history.BASE_MODEL_SENSOR,
            RETRAINING,
            interval,
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
            interval,
            _look_at_endpoint,
            "Serves the wanted version if it is not serving: after a failed rollout, or when the "
            "endpoint has crashed. It retries as often as `automation.retries` allows.",
        ),
        *build_dead_run_sensors(settings),
    ]


def _sensor(
    settings: PipelineSettings, name: str, job: str, seconds: int, look_once: Look, description: str
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

    # So `read_cursor` takes a cursor with other keys for none, and the time starts over.
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
        watched = read_cursor(cls, cursor)
        # With a clock that was put back, the time to wait could be anything.
        is_known = watched is not None and watched.state == state and watched.since <= now
        return watched if watched and is_known else cls(state=state, since=now)


NEWEST_VERSIONS = 50
"""Of these and the wanted one it is asked which text they know; older ones are superseded."""


def _look_at_text(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, models: Registry
) -> dg.SensorResult:
    settings, now = pipeline.settings, datetime.now(UTC)
    try:
        sources = look(pipeline)
    except SourceChanged as error:
        return dg.SensorResult(skip_reason=f"{error}; checking again at the next tick")
    except UserError as error:
        message = str(error)
        # Without what belongs to a single request, so that the same fault is told only once.
        lasting = OF_ONE_REQUEST.sub("", message)
        tell_once(settings, pipeline.store, "sources", message, context.log.warning, lasting)
        raise
    # All is well again, so the next fault is told, even if it is the same.
    tell_once(settings, pipeline.store, "sources", None, context.log.warning)
    # Before the decision: the UI shows the new text also while nothing may be launched.
    observe(context.instance, settings, sources)
    # The registry after the sources, whose look may take long: a person may decide meanwhile.
    text, state = text_of(sources), models.state()
    known_texts = _known_texts(pipeline, state)
    cursor = Watched.at(now.timestamp(), text.name, context.cursor)
    # The text is new at this tick, so its files are recorded.
    if cursor.since == now.timestamp():
        surveys = Surveys(pipeline.store, settings.name)
        surveys.write(text)
        # A run under way may produce a version that was trained on one of the earlier texts.
        if not Runs(context.instance, settings).unfinished():
            surveys.keep({text.name, *known_texts.values()})
    outcome = _decide_on_text(context, pipeline, state, known_texts, text, cursor, now)
    return conclude(context, pipeline, "waiting", outcome, cursor.model_dump_json())


def _decide_on_text(
    context: dg.SensorEvaluationContext,
    pipeline: PipelineResource,
    state: RegistryState,
    known_texts: dict[int, str],
    text: TextSnapshot,
    cursor: Watched,
    now: datetime,
) -> dg.RunRequest | Wait:
    settings = pipeline.settings
    automation = settings.automation
    versions = [
        version for version in state.versions if known_texts.get(version.version) == text.name
    ]
    question = ask(text.name, state, versions, automation)
    if isinstance(question, Wait):
        return question
    if not state.versions and _has_retrained(context.instance, settings):
        # A store that is not there looks like a new one, whose first model would be served.
        return Wait(
            f"The store {settings.store} has no version of {settings.name}, though runs have made "
            "some: is its disk mounted, and `store` right? To begin again: llm-assets run",
            is_alarm=True,
        )
    earlier_text = known_texts.get(question.against) if question.against is not None else None
    is_unread, reads_on = question.is_unread, earlier_text == text.name
    if question.against is not None and is_unread:
        base, wanted = pipeline.record.find_current(BASE), state.get(question.against)
        # A run would end at once, since nothing is trained further from another base model.
        is_unread = base is None or has_base(pipeline.store, wanted, base.fingerprint)
        if reads_on and not is_unread:
            return Wait(
                f"Version {wanted.version}, which is wanted, was made from another base model than "
                "the newest one, so the rest of the text is not read on from it. Where "
                f"`base_model` names its own again: {materialize_command(BASE)}"
            )
    changed_bytes = Surveys(pipeline.store, settings.name).changed_bytes(text, earlier_text)
    least = automation.minimum_changed_megabytes * 1e6
    # Bytes are known of files alone: a change of any other source counts, however small.
    is_small = text.is_all_files and changed_bytes is not None and changed_bytes <= least
    # Files that are still to be read need not have changed.
    if is_small and not is_unread:
        if not changed_bytes:
            return Wait("Files were only renamed: there is nothing to learn.")
        return Wait(
            f"{changed_bytes / 1e6:.3f} MB of the files differ from what the wanted model has read;"
            f" `automation.minimum_changed_megabytes` is {least / 1e6:g}."
        )
    # Files may still be in the middle of a copy.
    quiet, waited = automation.quiet_minutes * 60, now.timestamp() - cursor.since
    if waited < quiet:
        return Wait(
            f"The text changed {waited:.0f} s ago; waiting until it is unchanged for {quiet:.0f} s."
        )
    overrides: dict[str, Any] = {
        "continue_from_champion": automation.continue_from_champion,
        "longer": question.longer,
    }
    if reads_on:
        # Otherwise the checkpoint that was made of this text before would be found.
        overrides |= {"from_version": question.against}
    config = training_config(settings, overrides)
    return request_run(question, Runs(context.instance, settings), now, history.TEXT_SENSOR, config)


def _has_retrained(instance: dg.DagsterInstance, settings: PipelineSettings) -> bool:
    succeeded = dg.RunsFilter(
        job_name=settings.dagster_name(RETRAINING),
        tags={history.PIPELINE_TAG: settings.name},
        statuses=[dg.DagsterRunStatus.SUCCESS],
    )
    return bool(instance.get_run_records(succeeded, limit=1))


def _known_texts(pipeline: PipelineResource, state: RegistryState) -> dict[int, str]:
    """Version to the name of the text that it was last trained on, for the newest versions and the
    wanted one; base models have none."""
    older, newest = state.versions[:-NEWEST_VERSIONS], state.versions[-NEWEST_VERSIONS:]
    wanted, texts = state.find("wanted"), {}
    for version in [*(entry for entry in older if entry == wanted), *newest]:
        fingerprint = version.lineage.get("raw_corpus")
        if fingerprint and (manifest := find_manifest(pipeline.store, "raw_corpus", fingerprint)):
            texts[version.version] = hash_json(manifest.inputs)
    return texts


# By default, Dagster ends a tick after 60 s. If the Hub does not answer, the tick still has to look
# into this machine's cache.
HUB_SECONDS = 10.0
BASE = "base_model"


def _look_at_base_model(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, models: Registry
) -> dg.SensorResult:
    # A model on the Hub is pinned, so there is nothing to remember about its files.
    is_on_hub = pipeline.settings.base_model.hub is not None
    watched = None if is_on_hub else _watch_files(pipeline.settings, context.cursor)
    outcome = _decide_on_base_model(context, pipeline, watched)
    cursor = watched.model_dump_json() if watched else None
    return conclude(context, pipeline, "base_model", outcome, cursor)


def _watch_files(settings: PipelineSettings, cursor: str | None) -> Watched:
    """What the base model's files hold now.

    Files that may still be in the middle of a copy are not read: half a model looks like another.
    """
    now = datetime.now(UTC).timestamp()
    files = [(path.name, path.stat()) for path in source_files(settings.base_model)]
    state = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    watched = Watched.at(now, hashlib.sha256(repr(state).encode()).hexdigest(), cursor)
    # The identity is computed once for each state, since that takes reading every byte.
    if watched.identity or now - watched.since < settings.automation.quiet_minutes * 60:
        return watched
    return watched.model_copy(update={"identity": hash_json(identify(settings.base_model))})


def _decide_on_base_model(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, watched: Watched | None
) -> dg.RunRequest | Wait:
    settings, base = pipeline.settings, pipeline.settings.base_model
    if settings.automation.new_base_model == "ignore":
        return Wait("`automation.new_base_model` is `ignore`.")
    if watched is None:
        with pipeline.hub_access():
            return _compare_with_hub(str(base.hub), str(base.revision))
    if not watched.identity:
        quiet = settings.automation.quiet_minutes
        return Wait(
            f"The base model's files changed less than {quiet:g} minutes ago; waiting until they "
            "are unchanged for that long."
        )
    trained_on = _trained_on(pipeline.record)
    if trained_on is None:
        return Wait("No base model has been read yet.")
    if hash_json(trained_on.settings) == watched.identity:
        return Wait("The base model is the one that was trained on.")
    if settings.automation.new_base_model == "tell":
        return Wait(
            f"The base model in {base.folder or base.package} is not the one that the model was "
            "trained on. To train from it, materialize the graph; `automation.new_base_model: "
            "retrain` does so automatically.",
            is_alarm=True,
        )
    # Without the wanted version in its name: these weights are tried once, whoever serves by then.
    question = TextQuestion(f"base-{watched.identity}", None)
    runs = Runs(context.instance, settings)
    return request_run(question, runs, datetime.now(UTC), history.BASE_MODEL_SENSOR)


def _trained_on(record: Pipeline) -> Manifest | None:
    """The base model behind the newest model; before there is one, the base model that was read.

    A run reads new weights first, and may fail before any training starts from them.
    """
    for artifact in map(record.find_current, ("eval_metrics", "checkpoint")):
        if artifact and (base := find_manifest(record.store, BASE, artifact.manifest.inputs[BASE])):
            return base
    current = record.find_current(BASE)
    return current.manifest if current else None


def _compare_with_hub(name: str, pinned: str) -> Wait:
    newest = newest_revision(name)
    if newest is None:
        return Wait(f"The Hub cannot be reached for {name}, and this machine has no copy of it.")
    # Whatever is newer is only told: training always uses the pinned revision.
    if newest == pinned:
        return Wait(f"{name} on the Hub is at the pinned revision.")
    return Wait(
        f"{name} on the Hub is at revision {newest}, but `base_model.revision` pins {pinned}. To "
        "train from the new one, set it there.",
        is_alarm=True,
    )


def newest_revision(name: str) -> str | None:
    """The commit of a Hub model's main branch.

    If the Hub cannot be asked, the one that this machine's cache saw last; None if it has none.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    try:
        return HfApi().model_info(name, timeout=HUB_SECONDS).sha
    except Exception:  # The Hub's own errors, or whichever those of its HTTP client are.
        folder = repo_folder_name(repo_id=name, repo_type="model")
        # Without a connection, the cache may still know of a newer revision than the pinned one.
        cached_ref = Path(constants.HF_HUB_CACHE) / folder / "refs" / "main"
        return cached_ref.read_text().strip() if cached_ref.exists() else None


def _look_at_endpoint(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, models: Registry
) -> dg.SensorResult:
    outcome = _decide_on_endpoint(context, pipeline, models.state())
    return conclude(context, pipeline, "endpoint", outcome)


def _decide_on_endpoint(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, state: RegistryState
) -> dg.RunRequest | Wait:
    settings, now = pipeline.settings, datetime.now(UTC)
    wanted, champion = state.find("wanted"), state.find("champion")
    if wanted is None or champion is None:
        return Wait("Nothing has been served yet.")
    crash, folder = None, StateFolder(endpoint_folder(settings))
    is_local = settings.platform == "local"
    is_gone = is_local and folder.running is None
    stopped = layout.stopped(settings.name)
    is_stopped = folder.stopped_path.exists() if is_local else pipeline.store.has_file(stopped)
    # The mark is made before the endpoint ends, so on this machine its process has to be gone, too.
    if is_stopped and (is_gone or not is_local):
        # Whoever stopped it may have done so because of the wanted version.
        return Wait("The endpoint was stopped, and stays so until `endpoint` is materialized.")
    if is_gone:
        # An endpoint that cannot start rewrites its status at each try, but not what it last
        # served: so all tries after one crash belong to one question, and `retries` limits them.
        good = folder.good.path
        crash = good.stat().st_mtime_ns if good.exists() else "never"
    if wanted == champion and crash is None:
        return Wait(f"Version {wanted.version} is wanted and serving.")
    if why := why_unable(settings, pipeline.record, wanted):
        return Wait(why, is_alarm=True)
    runs = Runs(context.instance, settings)
    busy, beside = runs.unfinished(), ""
    if is_gone:
        # A training that takes hours is not waited for. It may leave the endpoint no memory, so
        # tries beside it have a limit of their own.
        own = [run for run in busy if run.tags.get(LAUNCHED_BY_TAG) == history.ENDPOINT_SENSOR]
        busy, beside = own, "-beside" if own != busy else ""
    # Without a crash, each move of an alias asks another question, which has retries of its own.
    question = TextQuestion(f"serve-{crash or len(state.history)}{beside}", wanted.version)
    # What is decided already is served at once: blackouts and the budget are for training runs.
    request = request_run(question, runs, now, history.ENDPOINT_SENSOR, is_limited=False, busy=busy)
    if isinstance(request, Wait):
        reason = f"Version {wanted.version} is wanted, but does not serve. {request.reason}"
        return replace(request, reason=reason)
    return request


QUALITY_SECONDS = 15 * 60
"""Between two looks at the endpoint, each of which asks for its bits on held-out text."""
MOST_TIMES_LONGER = 8
"""Than usual, of a training that is to make a version serve as well as before."""
ANSWER_SECONDS, LOOK_SECONDS = 20.0, 40.0
"""For one answer of the endpoint and for a whole look: Dagster ends a tick after 60 s."""
SILENCE = "quality_silence"
"""Topic of the alarm that the endpoint does not answer."""
LEAST_REQUESTS = 20
"""Fewer say nothing about the share that failed."""


def _look_at_quality(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, models: Registry
) -> dg.SensorResult:
    settings = pipeline.settings
    if settings.platform != "local":
        return dg.SensorResult(skip_reason="Google Cloud's own alerts watch an endpoint there.")
    running = endpoint_status(settings)
    state = models.state()
    champion = state.find("champion")
    if running is None or running.phase != "serving" or champion is None:
        return dg.SensorResult(
            skip_reason="No endpoint is serving; `endpoint_follows` takes care of that."
        )
    # The documents on which the version was judged, so what differs is the endpoint and not the
    # text.
    documents = judged_documents(pipeline.store, champion)
    with LiveEndpoint(running, ANSWER_SECONDS, LOOK_SECONDS) as live:
        before = read_cursor(Requests, context.cursor)
        faults_by_topic, next_cursor = _ask(live, documents, before, settings)
    alarms: list[str] = []
    for topic, faults in faults_by_topic.items():
        finding = "cannot be checked" if topic == SILENCE else "performs worse than before"
        alarm = f"Version {champion.version} {finding}: {' '.join(faults)}" if faults else None
        # Each look counts other requests, so only the number of faults identifies the state.
        counted_as = f"{champion.version}: {len(faults)} faults"
        tell_once(settings, pipeline.store, topic, alarm, context.log.warning, counted_as)
        if alarm:
            alarms.append(alarm)
    # A look that could not count leaves the cursor, so that the next look counts those requests,
    # too.
    cursor = next_cursor.model_dump_json() if next_cursor else context.cursor
    if not alarms:
        return tick_result(Wait(f"Version {champion.version} serves well."), cursor)
    alarm = " ".join(alarms)
    # No training helps an endpoint that does not answer.
    may_help = any(faults for topic, faults in faults_by_topic.items() if topic != SILENCE)
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
    """What a look finds wrong, as sentences by topic, and the cursor from which the next one
    counts.

    A topic that could not be examined is left out: it is neither reported nor withdrawn.
    """
    faults_by_topic: dict[str, list[str]] = {}
    cursor = None
    try:
        total = live.requests()
        since = total.since(before)
        if since.all >= LEAST_REQUESTS:
            most = settings.automation.quality.most_failures
            faults_by_topic["quality"], cursor = [], total
            if since.failed > most * since.all:
                faults_by_topic["quality"].append(
                    f"{since.failed:,} of {since.all:,} requests failed since the last check; "
                    f"`automation.quality.most_failures` is {most:g}."
                )
        else:
            # Too few to judge: the cursor stays, so that requests of several looks add up.
            cursor = total.minus(since)
        faults_by_topic["quality_bits"] = live.deviations(documents)
        # This comes last, so that only a look that got all its answers withdraws the alarm.
        faults_by_topic[SILENCE] = []
    except UserError as error:
        faults_by_topic[SILENCE] = [str(error)]
    if cursor:
        with suppress(UserError):
            # The look's own requests are not a client's.
            cursor = cursor.plus(live.requests().since(total))
    return faults_by_topic, cursor


def _retrain(
    context: dg.SensorEvaluationContext,
    settings: PipelineSettings,
    wanted: ModelVersion | None,
    version: int,
) -> dg.RunRequest | Wait:
    # Further training continues from the wanted version, which is not the one that serves badly.
    if wanted is None or wanted.version != version:
        wanted_name = f"version {wanted.version}" if wanted else "none"
        return Wait(f"It is not trained further, since {wanted_name} is wanted.")
    runs, question = Runs(context.instance, settings), TextQuestion("quality", version)
    launched = runs.launched_for(question.name)
    # The version still serves badly, so no training that succeeded has helped.
    helpless = sum(run.dagster_run.status is dg.DagsterRunStatus.SUCCESS for run in launched)
    # Longer each time: with unchanged text, the same training would be found in the store.
    longer = 2**helpless
    if longer > MOST_TIMES_LONGER:
        reason = f"Training it further, up to {MOST_TIMES_LONGER} times as long, did not help."
        return Wait(reason, is_alarm=True)
    options = {"continue_from_champion": True, "from_version": version, "longer": longer}
    config = training_config(settings, options)
    return request_run(question, runs, datetime.now(UTC), history.QUALITY_SENSOR, config)
