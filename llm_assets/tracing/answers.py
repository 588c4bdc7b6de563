"""Which answer is meant, and which version gave it."""

from dataclasses import dataclass
from pathlib import Path

from artifacts.errors import UserError
from llm_assets.registry.records import ModelVersion
from llm_assets.registry.state import RegistryState
from serving import journal
from serving.settings import JournalSettings


@dataclass(frozen=True)
class Asked:
    """An answer to trace."""

    version: ModelVersion
    answer: str
    prompt: str = ""
    """What it was given to, as the client sent it, where that was kept."""


def of_text(state: RegistryState, text: str, version: int | None) -> Asked:
    """A text, taken as an answer of a version, or else of the one that serves."""
    if version is not None:
        return Asked(state.get(version), text)
    serving = state.find("champion") or state.find("wanted")
    if serving is None:
        raise UserError("No version is registered yet: make one with `llm-assets run`.")
    return Asked(serving, text)


def of_request(
    state: RegistryState,
    folder: Path,
    settings: JournalSettings,
    request: str,
    text: str | None,
) -> list[Asked]:
    """The answers to a request, as the endpoint kept them.

    Args:
        folder: the endpoint's state folder.
        request: its `X-Request-Id`.
        text: the answer, where only its hash was kept.

    Raises:
        UserError: the request is not on record, or its text was not kept and none is given, or
            another is.
    """
    entries = journal.find_entries(folder, request, settings.days)
    if not entries:
        kept = f"answers are kept for {settings.days:g} days"
        reason = "answers are not kept now" if settings.keep == "off" else kept
        raise UserError(
            f"The endpoint has no answer to the request {request!r} on record in {folder}: the id "
            f"is wrong, of another pipeline, or too old ({reason}, `endpoint.journal`). Give the "
            "answer itself with --text."
        )
    asked = []
    for entry in entries:
        if entry.answer is None and text is None:
            raise UserError(
                f"Version {entry.version} answered the request {request!r} at {entry.at}; of the "
                "answer only a hash was kept (`endpoint.journal.keep: text` keeps it). Give it "
                "with --text."
            )
        if text is not None and not journal.is_answer(folder, entry, text):
            continue
        answer = text if entry.answer is None else entry.answer
        asked.append(Asked(state.get(int(entry.version)), answer or "", entry.prompt or ""))
    if not asked:
        raise UserError(
            f"The text is not what the request {request!r} was answered with: its hash differs. "
            "Give the answer to the letter, white space included."
        )
    return asked
