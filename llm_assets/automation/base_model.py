"""The sensor that looks whether there is another base model than the one that was trained on."""

import hashlib
from datetime import UTC, datetime
from pathlib import Path

from dagster import (
    DefaultSensorStatus,
    RunRequest,
    SensorDefinition,
    SensorEvaluationContext,
    SensorResult,
    sensor,
)
from pydantic import BaseModel, ConfigDict

from artifacts.store.identity import hash_json
from artifacts.store.manifest import Manifest
from artifacts.store.pipelines import Pipeline
from llm_assets.assets.stage import own_resources, user_faults
from llm_assets.automation.decision import TextQuestion, Wait, request_run
from llm_assets.automation.jobs import RETRAINING
from llm_assets.automation.launched import BASE_MODEL_SENSOR, Runs, read_cursor
from llm_assets.automation.notifications import conclude
from llm_assets.config import PipelineSettings
from llm_assets.pipeline import PipelineResource
from llm_assets.registry.start import find_manifest
from recipes.model.base_model import identify, source_files

SECONDS = 10.0
BASE = "base_model"


class BaseModelCursor(BaseModel):
    """What the sensor remembers, so that weights are read only when they may have changed."""

    model_config = ConfigDict(extra="forbid")

    files: str
    """A hash of names, sizes and times of the base model's files."""
    identity: str = ""
    """Of what they hold; empty until they have been unchanged for a while."""
    since: float = 0.0
    """When they were first seen so, in seconds since 1970."""


def build_base_model_sensor(
    settings: PipelineSettings, status: DefaultSensorStatus
) -> SensorDefinition:
    """The sensor `base_model_changed`."""

    @sensor(
        name=settings.dagster_name(BASE_MODEL_SENSOR),
        job_name=settings.dagster_name(RETRAINING),
        minimum_interval_seconds=settings.automation.check_seconds,
        default_status=status,
        description="Checks whether the base model's folder or package has weights other than "
        "those trained on, or the Hub a revision other than the pinned one, which it only "
        "reports. `automation.new_base_model` says what happens with other weights.",
    )
    @own_resources(settings)
    def base_model_changed(
        context: SensorEvaluationContext, pipeline: PipelineResource
    ) -> SensorResult:
        with user_faults():
            known = _known(pipeline.settings, context.cursor)
            found = _decide(context, pipeline, known)
        cursor = known.model_dump_json() if known else None
        return conclude(context, pipeline, "base_model", found, cursor)

    return base_model_changed


def _known(settings: PipelineSettings, cursor: str | None) -> BaseModelCursor | None:
    """What the files hold now; None of a model on the Hub, which is pinned.

    Files that may still be copied are not read: half of another model is one, too.
    """
    base, now = settings.base_model, datetime.now(UTC).timestamp()
    if base.hub:
        return None
    found = [(path.name, path.stat()) for path in source_files(base)]
    state = [(name, one.st_size, one.st_mtime_ns) for name, one in found]
    files = hashlib.sha256(repr(state).encode()).hexdigest()
    known = read_cursor(BaseModelCursor, cursor)
    if known is None or known.files != files or known.since > now:
        known = BaseModelCursor(files=files, since=now)
    if known.identity or now - known.since < settings.automation.quiet_minutes * 60:
        return known
    return known.model_copy(update={"identity": hash_json(identify(base))})


def _decide(
    context: SensorEvaluationContext, pipeline: PipelineResource, known: BaseModelCursor | None
) -> RunRequest | Wait:
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
    return request_run(question, runs, datetime.now(UTC), BASE_MODEL_SENSOR)


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
        return HfApi().model_info(name, timeout=SECONDS).sha
    except Exception:  # The Hub's own errors, or whichever those of its HTTP client are.
        folder = repo_folder_name(repo_id=name, repo_type="model")
        seen = Path(constants.HF_HUB_CACHE) / folder / "refs" / "main"
        return seen.read_text().strip() if seen.exists() else None
