"""What a person says of versions: approve, reject, go back."""

from artifacts.errors import UserError
from artifacts.progress import Report
from llm_assets.cli.session import Session
from llm_assets.endpoint.follow import serve_wanted
from llm_assets.forgetting.erase import read_list


def approve(session: Session, version: int, name: str, reason: str, report: Report) -> None:
    """Have a version served on a person's word.

    Raises:
        UserError: it is withdrawn, since it was trained on what was forgotten.
    """
    refuse_withdrawn(session, version)
    session.registry.approve(version, name, reason)
    follow(session, report)


def refuse_withdrawn(session: Session, version: int) -> None:
    """Raise UserError for a version that was trained on what was forgotten since."""
    withdrawn = read_list(session.record.store, session.settings.name).withdrawn
    since = next((one.at for one in withdrawn if one.version == version), None)
    if since is not None:
        raise UserError(
            f"Version {version} was withdrawn on {since:%Y-%m-%d}, since it was trained on text "
            "that was forgotten, and neither serves nor leaves again. `llm-assets versions` lists "
            "the others; `llm-assets run` makes one without that text."
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
