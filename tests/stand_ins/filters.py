"""The small part of Google's list filters that label look-ups need."""

import re
from collections.abc import Mapping

CLAUSE = re.compile(r'labels\.(?P<key>[\w-]+)\s*=\s*"?(?P<value>[\w-]+)"?')


def matches_labels(expression: str, labels: Mapping[str, str]) -> bool:
    """Whether labels satisfy `labels.a="b" AND labels.c="d"`; an empty expression is satisfied."""
    return all(
        labels.get(clause["key"]) == clause["value"] for clause in CLAUSE.finditer(expression)
    )
