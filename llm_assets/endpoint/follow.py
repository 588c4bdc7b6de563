"""The endpoint follows the registry: what is wanted is served, and what serves is confirmed."""

import time
from collections.abc import Callable
from contextlib import suppress

from artifacts.errors import MissingArtifact, UserError, materialize_command
from artifacts.progress import Report
from artifacts.store.pipelines import Pipeline
from llm_assets.config import PipelineSettings
from llm_assets.endpoint.base import LiveAddress, ServingPlatform
from llm_assets.endpoint.folder import why_unable
from llm_assets.registry.base import Registry
from llm_assets.registry.card import verify_model
from llm_assets.registry.state import GATE, ModelVersion, Move, RegistryState, RegistryUnreachable
from serving.rollout import NoLongerWanted, RolloutFailed

LOOK_SECONDS = 1.0
"""Between two looks whether a version is still wanted."""


class Overruled(UserError):
    """Somebody else decided otherwise before a person's decision was served."""


class NothingToServe(UserError):
    """The wanted version is a base model that cannot serve what its recipe teaches."""


def serve_decision(
    registry: Registry,
    serving: ServingPlatform,
    settings: PipelineSettings,
    record: Pipeline,
    report: Report,
    name: str,
    holds: Callable[[int], bool],
) -> None:
    """Have what a person decided served, and report which version serves.

    Args:
        name: the person's.
        holds: whether the decision still holds if this version is wanted.

    Raises:
        Overruled: it does not hold; the version that is wanted instead serves.
        UserError: see `serve_wanted`.
    """
    version, address = serve_wanted(registry, serving, settings, record, report, by_person=True)
    wanted = version.version if address.instead_of is None else address.instead_of
    move = _move_to(registry.state(), wanted)
    serves = f"Version {version.version} serves at {address.url}."
    if not holds(wanted):
        raise Overruled(f"Your decision was overruled: {_told(move)}. {serves}")
    if move.by != name.strip():
        report(f"{_told(move)}.")
    report(serves)


def serve_wanted(
    registry: Registry,
    serving: ServingPlatform,
    settings: PipelineSettings,
    record: Pipeline,
    report: Report,
    by_person: bool = False,
) -> tuple[ModelVersion, LiveAddress]:
    """Have the wanted version served; whichever version serves in the end becomes the champion.

    If another version becomes wanted before the first has all traffic, that one is served, and the
    report says who decided it. If nothing serves and the wanted version is damaged or cannot start,
    the last served version that nobody rejected is served instead, and the report says so.

    Args:
        record: the pipeline's, whose artifacts are compared with their manifests before they serve.
        by_person: a manual decision: all traffic switches as soon as the version answers, or as a
            rollout of it that is under way ends.

    Raises:
        MissingArtifact: nothing is registered, or the wanted model was deleted.
        DamagedArtifact: the wanted model's files have changed.
        RolloutFailed: the version that served before still does.
        NothingToServe: until a version is promoted or approved; what serves goes on serving.
        UserError: nothing can be served.
    """

    def serve(model: ModelVersion, by: PipelineSettings, still: Callable[[], bool]) -> LiveAddress:
        verify_model(record, model.model_url, weights=model.weights)
        return serving.serve(by, model, report, still)

    while True:
        state = registry.state()
        wanted = state.find("wanted")
        if wanted is None:
            raise MissingArtifact(
                "The registry has no version to serve. Materialize the model again: "
                + materialize_command("model_version")
            )
        if why := why_unable(settings, record, wanted):
            on = f" Version {state.champion} goes on serving; `llm-assets stop` ends it."
            raise NothingToServe(why + on * serving.serves(settings))
        if by_person:
            report(
                "manual decision: all traffic switches as soon as the version answers; a rollout "
                "of this version that is under way goes through its steps first"
            )
            rollout = settings.endpoint.rollout.model_copy(update={"steps": ()})
            endpoint = settings.endpoint.model_copy(update={"rollout": rollout})
        by = settings.model_copy(update={"endpoint": endpoint}) if by_person else settings
        still_wanted = _still_wanted(registry, wanted.version)
        # If another version becomes wanted meanwhile, the loop serves that one.
        with suppress(NoLongerWanted):
            try:
                version, address = wanted, serve(wanted, by, still_wanted)
            except RolloutFailed as error:
                raise RolloutFailed(f"{error}\n{_ways_on(wanted)}") from error
            except UserError as error:
                # The last that served before and was not rejected, for an endpoint at which
                # nothing answers; what serves goes on serving.
                moves = [move for move in reversed(state.history) if move.alias == "champion"]
                earlier = (state.get(m.version) for m in moves if m.version != wanted.version)
                allowed = (one for one in earlier if not state.is_rejected(one.weights))
                fallback = next((v for v in allowed if not why_unable(settings, record, v)), None)
                if fallback is None or serving.serves(settings):
                    raise
                report(f"WARNING: version {wanted.version} cannot be served: {error}")
                try:
                    address = serve(fallback, settings, still_wanted)
                except UserError:
                    # The wanted version was to be served, so its fault is the one to report.
                    raise error from None
                version, address = (
                    fallback,
                    address.model_copy(update={"instead_of": wanted.version}),
                )
                report(
                    f"WARNING: version {version.version} serves in place of version "
                    f"{wanted.version}"
                )
            if address.compared:
                report(f"engine {address.engine}: {address.compared}")
            comment = f"took over: {address.compared}" if address.compared else ""
            # Refused if another version is wanted by now; then the loop goes on with that one.
            if registry.confirm(version.version, comment, wanted.version):
                return version, address
        state = registry.state()
        move = _move_to(state, state.succession[-1])
        by_person = move.by != GATE
        report(f"WARNING: version {wanted.version} is no longer wanted: {_told(move)}")


def _still_wanted(registry: Registry, version: int) -> Callable[[], bool]:
    """Tells whether a version is the wanted one, as of a moment ago."""
    # The clock may begin at 0 with the machine; the first look asks then, too.
    asked_at, answer = -LOOK_SECONDS, True

    def look() -> bool:
        nonlocal asked_at, answer
        if time.monotonic() - asked_at >= LOOK_SECONDS:
            # While the registry cannot be reached, the rollout goes on; it is confirmed only
            # afterward.
            with suppress(RegistryUnreachable):
                answer = registry.state().succession[-1:] == [version]
            asked_at = time.monotonic()
        return answer

    return look


def _move_to(state: RegistryState, version: int) -> Move:
    """How a version became the wanted one."""
    moves = (move for move in reversed(state.history) if move.alias == "wanted")
    return next(move for move in moves if move.version == version)


def _told(move: Move) -> str:
    return f"{move.by} wants version {move.version} ({move.reason})"


def _ways_on(wanted: ModelVersion) -> str:
    number = wanted.version
    hint = f"Version {number} stays wanted: materialize `endpoint` to try again"
    if wanted.is_base:
        return f"{hint}, or `llm-assets approve VERSION --reason REASON` to have another."
    return (
        f"{hint}, `llm-assets approve {number} --reason REASON` to have it without the tests of a "
        f"rollout, or `llm-assets reject {number} --reason REASON` to give it up."
    )
