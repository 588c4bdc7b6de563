"""The endpoint follows the registry: what is wanted is served, and what serves is confirmed."""

from collections.abc import Callable

from artifacts.errors import MissingArtifact, UserError, materialize_command
from artifacts.store.pipelines import Pipeline
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import LiveAddress, ServingPlatform
from llm_assets.registry.base import Registry
from llm_assets.registry.card import verify_model
from llm_assets.registry.state import ModelVersion
from serving.rollout import RolloutFailed

Report = Callable[[str], None]


def serve_wanted(
    registry: Registry,
    serving: ServingPlatform,
    settings: PipelineSettings,
    record: Pipeline,
    report: Report,
    by_person: bool = False,
) -> tuple[ModelVersion, LiveAddress]:
    """Have the wanted version served; the champion is whichever serves in the end.

    Where nothing serves and the wanted version is damaged or cannot be started, the version that
    served before is served instead, and the report says so.

    Args:
        record: the pipeline's, whose artifacts are compared with their manifests before they serve.
        by_person: a manual decision: all traffic switches as soon as the version answers.

    Raises:
        MissingArtifact: nothing is registered, or the wanted model was deleted.
        DamagedArtifact: the wanted model's files have changed.
        RolloutFailed: the version that served before still does.
        UserError: nothing can be served.
    """
    state = registry.state()
    wanted, champion = state.find("wanted"), state.find("champion")
    if wanted is None:
        raise MissingArtifact(
            "The registry has no version to serve. Materialize the model again: "
            + materialize_command("model_version")
        )
    if by_person:
        report("manual decision: all traffic switches as soon as the version answers")
    chosen = _at_once(settings) if by_person else settings
    try:
        verify_model(record, wanted.model_url, weights=wanted.weights)
        version, served = wanted, serving.serve(chosen, wanted, report)
    except RolloutFailed as error:
        raise RolloutFailed(f"{error}\n{_ways_on(wanted.version)}") from error
    except UserError as error:
        before = champion if champion != wanted else state.find("previous")
        if before is None or before == wanted or serving.serves(settings):
            raise
        report(f"WARNING: version {wanted.version} cannot be served: {error}")
        version, served = before, _serve_again(serving, settings, record, before, error, report)
        served = served.model_copy(update={"instead_of": wanted.version})
        report(f"WARNING: version {version.version} serves in place of version {wanted.version}")
    if served.compared:
        report(f"engine {served.engine}: {served.compared}")
    registry.confirm(version.version, f"took over: {served.compared}" if served.compared else "")
    return version, served


def _ways_on(version: int) -> str:
    return (
        f"Version {version} stays wanted: materialize `endpoint` to try again, `llm-assets approve "
        f"{version}` to have it whatever was seen, or `llm-assets reject {version}` to give it up."
    )


def _serve_again(
    serving: ServingPlatform,
    settings: PipelineSettings,
    record: Pipeline,
    before: ModelVersion,
    fault: UserError,
    report: Report,
) -> LiveAddress:
    """Serve the version before; where that fails too, the wanted one's fault is the message."""
    try:
        verify_model(record, before.model_url, weights=before.weights)
        return serving.serve(settings, before, report)
    except UserError:
        raise fault from None


def _at_once(settings: PipelineSettings) -> PipelineSettings:
    rollout = settings.endpoint.rollout.model_copy(update={"steps": ()})
    endpoint = settings.endpoint.model_copy(update={"rollout": rollout})
    return settings.model_copy(update={"endpoint": endpoint})
