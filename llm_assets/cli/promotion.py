"""What a person says of versions: approve, reject, go back."""

from artifacts.progress import Report
from llm_assets.cli.session import Session
from llm_assets.endpoint.follow import serve_wanted
from llm_assets.forgetting.erase import read_list


def approve(session: Session, version: int, name: str, reason: str, report: Report) -> None:
    """Have a version served on a person's word.

    Raises:
        UserError: it is withdrawn, since it was trained on what was forgotten.
    """
    read_list(session.record.store, session.settings.name).refuse_withdrawn(version)
    session.registry.approve(version, name, reason)
    follow(session, report)


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
