"""Cuts a sequence where its content says so, not after so many elements.

A sequence that grew in one place is then cut as before elsewhere, and what was made of those parts
is found again: content-defined chunking (Muthitacharoen and others, "A Low-bandwidth Network File
System", 2001), with whole elements in place of bytes.
"""

import hashlib
from dataclasses import dataclass


@dataclass
class Cutter:
    """Says after which elements to cut."""

    least: int
    """Bytes that a part has at least, unless the sequence ends."""
    most: int
    """Bytes after which a part ends at the next element, whatever it is."""
    mean: int
    """In between, an element ends its part about once in so many bytes."""
    pending: int = 0
    """Bytes since the last cut."""

    def ends(self, name: str, size: int) -> bool:
        """Whether a part ends with this element, which comes next."""
        self.pending += size
        ends = self.pending >= self.most or (
            self.pending >= self.least and hash64(name) % self.mean < size
        )
        if ends:
            self.pending = 0
        return ends


def hash64(text: str) -> int:
    """A number in [0, 2**64) that follows from the text alone."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")
