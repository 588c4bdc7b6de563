"""A person's word: approve, reject, roll back."""

from collections.abc import Callable

from artifacts.errors import UserError
from llm_assets.commands.session import Session
from llm_assets.gate.verdict import Decision

Report = Callable[[str], None]


def approve(session: Session, version: int, name: str, reason: str, report: Report) -> None:
    """Make a version champion on a person's word, and serve it."""
    session.registry.decide(version, Decision(approved=True, name=name, reason=reason))
    session.registry.promote(version, f"approved by {name}: {reason}")
    _serve_champion(session, report)


def reject(session: Session, version: int, name: str, reason: str, report: Report) -> None:
    """Record that a version shall not serve; where it is champion, the one before takes over."""
    session.registry.decide(version, Decision(approved=False, name=name, reason=reason))
    champion = session.registry.find("champion")
    if champion and champion.version == version:
        roll_back(session, name, reason, report)
    else:
        report(f"Version {version} is rejected; it did not serve.")


def roll_back(session: Session, name: str, reason: str, report: Report) -> None:
    """Make the version before the champion again, and serve it, without an outage."""
    before = session.registry.find("previous")
    if before is None:
        raise UserError("There is no version before the champion to roll back to.")
    session.registry.promote(before.version, f"rolled back by {name}: {reason}")
    _serve_champion(session, report)


def _serve_champion(session: Session, report: Report) -> None:
    champion = session.registry.find("champion")
    assert champion is not None, "promoting leaves a champion"
    served = session.serving.serve(session.settings, champion, report)
    report(f"Version {champion.version} serves at {served.url}.")
