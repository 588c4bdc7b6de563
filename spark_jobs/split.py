"""Which split a duplicate cluster belongs to.

A cluster's id is the smallest hash of its members' texts, read as a number in [0, 1). The lowest
numbers are held out, the next are validation, the rest is trained on. Since a cluster that grows,
or that a new document bridges to another, takes the smaller number, it can only move towards
held-out, then validation: what was once held out is never trained on later.
"""

from artifacts.shards import Split
from spark_jobs.settings import SplitSettings

_DIGITS = 15
"""Hexadecimal digits compared; 60 bits are exact in Python and in Spark's long alike."""


def split_of(cluster: str, settings: SplitSettings) -> Split:
    """The split of a cluster id (32 hexadecimal digits)."""
    number = cluster[:_DIGITS]
    if number < threshold(settings.held_out):
        return "held_out"
    if number < threshold(settings.held_out + settings.validation):
        return "validation"
    return "train"


def threshold(share: float) -> str:
    """The first cluster prefix past a share of all of them; prefixes compare as text."""
    number = round(share * 16**_DIGITS)
    return f"{number:0{_DIGITS}x}" if number < 16**_DIGITS else "g"
