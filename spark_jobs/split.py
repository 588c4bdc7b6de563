"""Which split a duplicate cluster belongs to.

A cluster's id is the smallest hash of its members' texts, read as a number in [0, 1). The lowest
numbers are held out, the next are validation, the rest is trained on. Since a cluster that grows,
or that a new document bridges to another, takes the smaller number, it can only move towards
held-out, then validation: what was once held out is never trained on later.

Where an earlier held-out set is pinned, exactly its documents are held out, and what the numbers
would have added to them is trained on.

Sources of text to replay are all replayed, whatever their numbers, since nothing is judged by them.
Their near-copies in other sources share a cluster with them, of which one document is left.
"""

from dataclasses import dataclass

import pyarrow as pa

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


@dataclass(frozen=True)
class Splitter:
    """Gives every document of a clean corpus its split."""

    settings: SplitSettings
    pinned: bool
    """Whether the corpus holds pinned documents."""
    replay: frozenset[str] = frozenset()
    """Names of the sources that are replayed."""

    def splits(self, documents: pa.Table | pa.RecordBatch) -> list[Split]:
        """The split of each row, by its `cluster`, `pinned` and `source`."""
        found = [split_of(cluster, self.settings) for cluster in documents["cluster"].to_pylist()]
        pins = documents["pinned"].to_pylist()
        if self.pinned:
            found = ["train" if split == "held_out" else split for split in found]
        if self.replay:
            sources = documents["source"].to_pylist()
            found = [
                "replay" if source in self.replay else split
                for split, source in zip(found, sources, strict=True)
            ]
        return ["held_out" if pin else split for split, pin in zip(found, pins, strict=True)]
