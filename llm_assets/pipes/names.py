"""Names and labels that Google accepts."""

import hashlib
import re
from collections.abc import Mapping

LONGEST_LABEL = 63
LONGEST_KEY = 56
"""Leaves room for `-` and an attempt's number within Google's 63 characters."""


def external_key(name: str, fingerprint: str) -> str:
    """The deterministic name of a job: a readable part and the fingerprint, at most 56 characters.

    Lower-case letters, digits and hyphens, beginning with a letter and ending without a hyphen, as
    Dataproc asks of a batch id. A fingerprint that is long or has other characters is hashed, so
    two fingerprints never share a key.
    """
    if not re.fullmatch(r"[a-z0-9]{1,40}", fingerprint):
        fingerprint = hashlib.sha256(fingerprint.encode()).hexdigest()[:20]
    room = LONGEST_KEY - len(fingerprint) - 1
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not readable or not readable[0].isalpha():
        readable = f"job-{readable}"
    return f"{readable[:room].strip('-')}-{fingerprint}"


def attempt_name(key: str, attempt: int) -> str:
    """The key itself for the first attempt, `key-2` for the second, and so on."""
    return key if attempt == 1 else f"{key}-{attempt}"


def as_labels(values: Mapping[str, str]) -> dict[str, str]:
    """Google labels: lower-case letters, digits, `_` and `-`, keys beginning with a letter."""
    labels = {}
    for key, value in values.items():
        clean = re.sub(r"[^a-z0-9_-]", "-", key.lower()).strip("-_")
        clean = clean if clean[:1].isalpha() else f"x-{clean}"
        labels[clean[:LONGEST_LABEL]] = re.sub(r"[^a-z0-9_-]", "-", str(value).lower())[
            :LONGEST_LABEL
        ].strip("-_")
    return labels


def as_dns_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """The same by RFC 1035, as Dataproc asks: no `_`, and a value begins with a letter, if any."""
    return {_as_dns_label(key): value and _as_dns_label(value) for key, value in labels.items()}


def _as_dns_label(text: str) -> str:
    clean = text.replace("_", "-")
    return (clean if clean[:1].isalpha() else f"x-{clean}")[:LONGEST_LABEL].strip("-")
