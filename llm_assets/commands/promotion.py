"""A person's word about versions, and the endpoint following it."""

from collections.abc import Callable

from llm_assets.commands.session import Session
from llm_assets.registry import decisions

Report = Callable[[str], None]


def approve(session: Session, version: int, name: str, reason: str, report: Report) -> None:
    """Make a version champion on a person's word, and serve it."""
    decisions.approve(session.registry, version, name, reason)
    serve_champion(session, report)


def reject(session: Session, version: int, name: str, reason: str, report: Report) -> None:
    """Refuse a version; where it is champion, the one before takes over and serves."""
    decisions.reject(session.registry, version, name, reason)
    serve_champion(session, report)


def roll_back(session: Session, name: str, reason: str, report: Report) -> None:
    """Make the version before the champion again, and serve it, without an outage."""
    decisions.roll_back(session.registry, f"{name}: {reason}")
    serve_champion(session, report)


def serve_champion(session: Session, report: Report) -> None:
    """Have the registry's champion served."""
    champion = session.registry.find("champion")
    assert champion is not None, "a registry with a judged version has a champion"
    served = session.serving.serve(session.settings, champion, report)
    report(f"Version {champion.version} serves at {served.url}.")
