"""Quality filters and the masking of personal data, both datatrove's."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from spark_jobs.settings import QualityFilter

Check = Callable[[str], str | None]
"""A text to the reason to drop it, or None."""

_MASKED_EMAIL = "email@example.com"
_MASKED_ADDRESS = "192.0.2.1"
"""An address set aside for documentation (RFC 5737)."""


@lru_cache
def quality_filter(name: QualityFilter) -> Check:
    """A filter by its name in the settings; its reasons begin with that name.

    A document stays as it is or goes; where datatrove's filter would leave out lines, they stay.
    """
    from datatrove.data import Document
    from datatrove.pipeline import filters

    types: dict[QualityFilter, Any] = {
        "gopher_quality": filters.GopherQualityFilter,
        "gopher_repetition": filters.GopherRepetitionFilter,
        "c4": filters.C4QualityFilter,
        "fineweb": filters.FineWebQualityFilter,
    }
    check = types[name]()

    def reason(text: str) -> str | None:
        result = check.filter(Document(text=text, id=""))
        kept, why = result if isinstance(result, tuple) else (result, None)
        return None if kept else ":".join(filter(None, (name, why)))

    return reason


@lru_cache
def personal_data_mask() -> Callable[[str], str]:
    """Replaces e-mail addresses and public IP addresses; the same text gives the same result."""
    from datatrove.pipeline.formatters.pii import PIIFormatter

    formatter = PIIFormatter(email_replacement=_MASKED_EMAIL, ip_replacement=_MASKED_ADDRESS)
    return formatter.format
