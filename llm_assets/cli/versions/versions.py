"""The registered versions: listed, and a person's word about them, which the endpoint follows."""

from typing import Any

from artifacts.errors import UserError
from artifacts.progress import Report
from llm_assets.cli.session import Session
from llm_assets.endpoint.follow import serve_wanted
from llm_assets.forgetting.listed import read_list
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


def approve(session: Session, version: int, name: str, reason: str, report: Report) -> None:
    """Have a version served on a person's word.

    Raises:
        UserError: it is withdrawn, since it was trained on what was forgotten.
    """
    _refuse_withdrawn(session, version)
    session.registry.approve(version, name, reason)
    follow(session, report)


def _refuse_withdrawn(session: Session, version: int) -> None:
    withdrawn = read_list(session.record.store, session.settings.name).withdrawn
    since = next((one.at for one in withdrawn if one.version == version), None)
    if since is not None:
        raise UserError(
            f"Version {version} was withdrawn on {since:%Y-%m-%d}, since it was trained on text "
            "that was forgotten, and cannot serve again. `llm-assets versions` lists the others; "
            "`llm-assets run` makes one without that text."
        )


def reject(session: Session, version: int, name: str, reason: str, report: Report) -> None:
    """Refuse a version; where it is wanted, the one before it is served."""
    session.registry.reject(version, name, reason)
    follow(session, report)


def roll_back(session: Session, name: str, reason: str, report: Report) -> None:
    """Serve the version before the one that serves, without an outage."""
    session.registry.roll_back(name, reason)
    follow(session, report)


def follow(session: Session, report: Report) -> None:
    """Have the wanted version served, by a person's word."""
    version, served = serve_wanted(
        session.registry,
        session.serving,
        session.settings,
        session.record,
        report,
        by_person=True,
    )
    report(f"Version {version.version} serves at {served.url}.")
