"""What people may do with the registry: approve, reject, go back."""

from artifacts.errors import UserError
from llm_assets.gate.verdict import Decision
from llm_assets.registry.base import ModelVersion, Registry


def approve(registry: Registry, version: int, name: str, reason: str) -> ModelVersion:
    """Make a version champion by a person's word, whatever the gate said; both are on record.

    Raises:
        UserError: name or reason is empty, or there is no such candidate.
    """
    found = registry.decide(version, _decision(True, name, reason))
    registry.promote(version, f"approved by {name}: {reason}")
    return found


def reject(registry: Registry, version: int, name: str, reason: str) -> ModelVersion:
    """Refuse a version by a person's word; where it is the champion, the one before takes over.

    Raises:
        UserError: name or reason is empty, or there is no such candidate.
    """
    found = registry.decide(version, _decision(False, name, reason))
    champion = registry.find("champion")
    if champion and champion.version == version:
        roll_back(registry, f"version {version} was rejected by {name}: {reason}")
    return found


def roll_back(registry: Registry, reason: str) -> ModelVersion:
    """Make the version that was champion before the champion again.

    Returns:
        The new champion. The endpoint follows when `endpoint` is materialized.

    Raises:
        UserError: there was no champion before.
    """
    previous = registry.find("previous")
    if previous is None:
        raise UserError("There is no version to go back to: the champion is the first one.")
    registry.promote(previous.version, f"rolled back: {reason}")
    return previous


def _decision(approved: bool, name: str, reason: str) -> Decision:
    if not name.strip() or not reason.strip():
        raise UserError("A decision needs a name and a reason: both are recorded with the version.")
    return Decision(approved=approved, name=name.strip(), reason=reason.strip())
