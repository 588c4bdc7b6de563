"""Documents that cannot be used: set aside and counted, fatal only when they are many."""

from collections.abc import Mapping
from dataclasses import dataclass

from artifacts.errors import UserError

EXAMPLES = 5
"""First ones that are named, of each source and reason."""
UNREAD = "unread: "
"""Begins the reason of what is not read though it was found only in reading, in an archive."""
SET_ASIDE = ("bad_file", "no_text_layer")
"""Reasons that never count towards `maximum_faulty_share`: whole files, each named."""


@dataclass(frozen=True)
class Fault:
    """Why a document cannot be used; `message` names its file and row."""

    reason: str
    message: str


def judge_faults(
    source: str, maximum_share: float, sound: int, counts: Mapping[str, int], examples: list[str]
) -> None:
    """Raise UserError where more than the allowed share of a source's documents was faulty.

    Args:
        sound: documents without fault.
        counts: reason to faulty documents; whole files set aside are passed over.
        examples: messages of the first ones.
    """
    faulty = sum(
        count
        for reason, count in counts.items()
        if reason not in SET_ASIDE and not reason.startswith(UNREAD)
    )
    if faulty > maximum_share * (faulty + sound):
        listed = "\n  ".join(examples)
        raise UserError(
            f"Source {source!r}: {faulty:,} of {faulty + sound:,} documents cannot be used, "
            f"more than the share allowed ({maximum_share:g}). The first:\n  {listed}\n"
            "Repair them, or raise `maximum_faulty_share` of the source."
        )
