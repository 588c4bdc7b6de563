"""Which ids of documents later stages, terminals and pages can bear."""

from artifacts.shown import has_control_characters

MOST_ID_BYTES = 1_024


def find_id_fault(identifier: str) -> str | None:
    """What is wrong with an id, in words that follow it; None where nothing is."""
    if has_control_characters(identifier):
        return "holds control characters or half a surrogate pair"
    if not identifier.strip():
        return "is empty"
    if len(identifier.encode()) > MOST_ID_BYTES:
        return f"has more than {MOST_ID_BYTES:,} bytes"
    return None
