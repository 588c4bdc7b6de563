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

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from artifacts.shards import Split
from spark_jobs.settings import SplitSettings

_DIGITS = 15
"""Hexadecimal digits compared; 60 bits are exact in Python and in Spark's long alike."""


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

    def add_split(self, documents: pa.Table) -> pa.Table:
        """The documents with their `split`, by their `cluster`, `pinned` and `source`."""
        clusters, settings = documents["cluster"], self.settings
        held_out = pc.less(clusters, threshold(settings.held_out))
        validation = pc.less(clusters, threshold(settings.held_out + settings.validation))
        in_place_of_held_out = "train" if self.pinned else "held_out"
        found = pc.if_else(validation, "validation", "train")
        found = pc.if_else(held_out, in_place_of_held_out, found)
        if self.replay:
            replayed = pc.is_in(documents["source"], pa.array(sorted(self.replay)))
            found = pc.if_else(replayed, "replay", found)
        split = pc.if_else(documents["pinned"], "held_out", found)
        return documents.append_column("split", split)


def in_split(documents: pa.Table, split: Split) -> np.ndarray:
    """Shape (documents,): whether each is in this split."""
    return np.asarray(pc.equal(documents["split"], split))
