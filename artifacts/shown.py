"""Untrusted text as people may see it: nothing in it reaches a terminal as a command."""

import re

_UNSAFE = re.compile(
    # Control characters but the line feed and tab, marks that turn the direction of writing, and
    # surrogates, which no terminal or file takes.
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_BREAKS = re.compile("[\t\n]")


def shown(text: str) -> str:
    r"""Text of several lines with its control characters written out: `\x1b[31m`, `\u202e`."""
    return _UNSAFE.sub(_escape, text)


def shown_in_line(text: str) -> str:
    r"""The same for what belongs on one line, such as an id or a path: breaks become `\n`."""
    return _BREAKS.sub(_escape, shown(text))


def has_control_characters(text: str) -> bool:
    """Whether `shown_in_line` would change the text."""
    return bool(_UNSAFE.search(text) or _BREAKS.search(text))


def _escape(found: re.Match[str]) -> str:
    return found.group().encode("unicode_escape").decode()
