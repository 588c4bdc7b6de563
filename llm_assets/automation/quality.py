"""Looks whether the served version is still as good as when it was judged, and has it trained
further if not, as `automation.quality` says."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

import dagster as dg

from artifacts.errors import UserError
from llm_assets import history
from llm_assets.automation.decision import TextQuestion, Wait, request_run
from llm_assets.automation.jobs import training_config
from llm_assets.automation.launched import Runs, read_cursor
from llm_assets.automation.notifications import tell_once, tick_result
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import LiveEndpoint, Requests, endpoint_folder, judged_documents
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.base import Registry
from llm_assets.registry.state import ModelVersion
from serving import endpoint as process
from serving.comparison import JudgedDocument

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


def look_at_quality(
    context: dg.SensorEvaluationContext, pipeline: PipelineResource, models: Registry
) -> dg.SensorResult:
    """One tick of the sensor `serving_quality`."""
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
            faults_by_topic["quality"], cursor = _failures(since, settings), total
        else:
            # Too few to judge: the cursor stays, so that requests of several looks add up.
            cursor = total.minus(since)
        faults_by_topic["quality_bits"] = live.deviations(documents)
        faults_by_topic[SILENCE] = []
    except UserError as error:
        faults_by_topic[SILENCE] = [str(error)]
    if cursor:
        with suppress(UserError):
            # The look's own requests are not a client's.
            cursor = cursor.plus(live.requests().since(total))
    return faults_by_topic, cursor


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
        wanted_name = f"version {wanted.version}" if wanted else "none"
        return Wait(f"It is not trained further, since {wanted_name} is wanted.")
    runs, question = Runs(context.instance, settings), TextQuestion("quality", version)
    launched = runs.launched_for(question.name)
    # A training of this length that succeeded did not help.
    helpless = sum(run.dagster_run.status is dg.DagsterRunStatus.SUCCESS for run in launched)
    # Longer each time: with unchanged text, the same training would be found in the store.
    longer = 2**helpless
    if longer > MOST_TIMES_LONGER:
        reason = f"Training it further, up to {MOST_TIMES_LONGER} times as long, did not help."
        return Wait(reason, is_alarm=True)
    options = {"continue_from_champion": True, "from_version": version, "longer": longer}
    config = training_config(settings, options)
    return request_run(question, runs, datetime.now(UTC), history.QUALITY_SENSOR, config)
