"""`llm-assets versions`: the registered versions, for people and for programs."""

from typing import Any

from llm_assets.cli.session import Session
from llm_assets.registry.card import describe_cost, describe_coverage, tell_story


def list_versions(session: Session) -> list[str]:
    """Two lines a version, and one that says what is wanted and what serves."""
    state = session.registry.state()
    wanted, champion = state.find("wanted"), state.find("champion")
    if wanted is None:
        return ["Nothing is registered yet."]
    lines = []
    for version in state.versions:
        aliases = state.aliases_of(version.version)
        label = f"{version.version} ({', '.join(aliases)})" if aliases else str(version.version)
        story = tell_story(state, version)
        lines.append(f"{label}: {story[-1] if story else 'the base model'}")
        cost = "" if version.dollars is None else f"; {describe_cost(version)}"
        lines.append(f"    trained on {describe_coverage(version)}{cost}")
    move = [move for move in state.history if move.alias == "wanted"][-1]
    lines.append(f"wanted: version {wanted.version}, by {move.by} ({move.reason})")
    serves = f"version {champion.version}" if champion else "nothing yet"
    pending = "" if champion == wanted else "; materialize `endpoint` to move the traffic"
    lines.append(f"serves: {serves}{pending}")
    return lines


def versions_as_json(session: Session) -> list[dict[str, Any]]:
    """The versions with their aliases, and the verdicts and decisions on their models."""
    state = session.registry.state()
    return [
        version.model_dump(mode="json")
        | {
            "aliases": state.aliases_of(version.version),
            "verdicts": [v.model_dump(mode="json") for v in state.verdicts_of(version.weights)],
            "decisions": [d.model_dump(mode="json") for d in state.decisions_of(version.weights)],
        }
        for version in state.versions
    ]
